// Rows that llama.cpp computes for one batch of tokens: logits, or with "hidden" the embeddings without pooling.
//
//     llama_logits MODEL TOKENS ROWS [hidden]
//
// TOKENS holds int32 values, ROWS receives float32 [tokens, columns].  The cache is float32, attention is not fused, and
// one thread computes.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "llama.h"

int main(int argc, char ** argv) {
    const bool hidden = argc > 4 && !std::strcmp(argv[4], "hidden");
    std::ifstream file(argv[2], std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::vector<int32_t> tokens(bytes.size() / 4);
    std::memcpy(tokens.data(), bytes.data(), 4 * tokens.size());
    const int count = int(tokens.size());

    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers = 0;
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (!model) return 1;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_batch = params.n_ubatch = 256;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.embeddings = hidden;
    params.pooling_type = LLAMA_POOLING_TYPE_NONE;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) return 2;

    llama_batch batch = llama_batch_init(count, 0, 1);
    batch.n_tokens = count;
    for (int i = 0; i < count; ++i) {
        batch.token[i] = tokens[i];
        batch.pos[i] = i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(context, batch)) return 3;
    const int columns = hidden ? llama_model_n_embd(model) : llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::ofstream out(argv[3], std::ios::binary);
    for (int i = 0; i < count; ++i) {
        const float * row = hidden ? llama_get_embeddings_ith(context, i) : llama_get_logits_ith(context, i);
        out.write(reinterpret_cast<const char *>(row), 4 * columns);
    }
    return out.good() ? 0 : 4;
}
