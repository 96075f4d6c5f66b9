// The blocks of attention make what they read of one token: each its queries; and the new key and value of a key head that
// block to whose split they belong, which puts them into the caches, of which no other block reads these cells.
template <class Cell> struct Heads {
    struct Words {
        Head<float> query;
        Head<Cell> key, value;
    };
    static constexpr bool PLACES = true;
    // By whole warps: query r of a key head becomes row r, of `columns`, by the warp that goes on with it.  `keys` are those
    // that a block has at a time.
    static __device__ __forceinline__ void place(const Words &a, int group, int shared, int keys, int splits, float *rows, int columns) {
        const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
        if (warp == 0) put_into_cache(a.key, group, keys, splits, rows);
        if (warp == 1) put_into_cache(a.value, group, keys, splits, rows + columns);
        for (int r = warp; r < shared; r += warps) {
            float *row = rows + r * columns;
            const Places<2> p = places_of(a.query, group * shared + r);
            bring_head(a.query, a.query.x.at + p.at[0], row, ByWarp());
            turn_head(a.query, a.query.positions.at + p.at[1], row, ByWarp(), [&](i64 c, float value) { row[c] = value; });
        }
        __syncwarp();
    }
    static __device__ __forceinline__ void put_into_cache(const Head<Cell> &a, int group, int keys, int splits, float *row) {
        const i64 id = a.ids[0];
        const int owner = id >= 0 && id < a.cache_rows ? (int)(id / keys % splits) : 0;  // who says that it is none
        if ((int)blockIdx.x == owner) ::place(a, (i64)group, row, ByWarp());
        __syncwarp();
    }
};
