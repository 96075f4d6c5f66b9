"""``POST /rerank`` of llama-server: documents in the order of their scores for a query."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..bodies.schemas import Objects, RerankBody
from ..errors import make_bad_request_error
from ..responses import JsonResponse, read_body
from ..state import get_serving_state


async def rerank(request: Request) -> Response:
    """Handle ``POST /rerank``: score documents, best first, in the format of Jina, or of TEI for ``texts``."""
    state = get_serving_state(request)
    state.require_ready()
    body, headers = await read_body(request, RerankBody)
    state.builder.require_served_model_if_strict(body.model)
    documents = body.texts if body.documents is None else body.documents
    if documents is None:
        raise make_bad_request_error("documents is missing", "documents")
    with state.count_running_embedding():
        scores, token_count = await state.builder.rank(body.query, documents)
    state.metrics.record_embedding(token_count)
    order = sorted(range(len(documents)), key=lambda i: (-scores[i], i))[: body.top_n]
    is_tei = body.documents is None
    has_texts = body.return_text if is_tei else body.return_documents
    results: list[Objects] = []
    for i in order:
        text: object = documents[i] if is_tei else {"text": documents[i]}
        result: Objects = {"index": i, "score" if is_tei else "relevance_score": float(scores[i])}
        results.append({**result, "text" if is_tei else "document": text} if has_texts else result)
    if is_tei:
        return JsonResponse(results, headers=headers)
    usage = {"prompt_tokens": token_count, "total_tokens": token_count}
    answer = {"model": state.service.model_name, "object": "list", "usage": usage, "results": results}
    return JsonResponse(answer, headers=headers)


def build_rerank_routes() -> list[Route]:
    """Return the routes of the rerank endpoint. There is a route for each of its names in llama-server."""
    paths = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")
    return [Route(path, rerank, methods=["POST"]) for path in paths]
