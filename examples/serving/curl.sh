#!/bin/sh
# The endpoints of a server by curl: sh curl.sh [URL]
set -eu
url=${1:-http://localhost:8080}

call() { # PATH [BODY]
  printf '\n%s\n' "$1"
  if [ $# -gt 1 ]; then curl -sS --fail-with-body "$url$1" -d "$2"; else curl -sS --fail-with-body "$url$1"; fi
}

call /health
call /v1/models
call /v1/completions '{"prompt": "It was a", "max_tokens": 16, "temperature": 0}'
call /v1/completions '{"prompt": "It was a", "max_tokens": 4, "stream": true}'
call /v1/chat/completions '{"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 16}'
call /v1/responses '{"input": "Hello.", "max_output_tokens": 16}'
call /v1/messages '{"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 16, "model": "any"}'
call /v1/embeddings '{"input": ["a ball", "a dance"]}'
call /completion '{"prompt": "It was a", "n_predict": 4, "n_probs": 2}'
call /tokenize '{"content": "It was a", "with_pieces": true}'
call /detokenize '{"tokens": [281, 486]}'
call /apply-template '{"messages": [{"role": "user", "content": "Hello."}]}'
call /slots
call /requests
call /metrics
