// Entries laid out anew: copies, padding, rows gathered and scattered by number.

// ----------------------------------------------------------------------------------------------------- copies

template <class T> struct Copied {
    i64 count;
    Axes axes;
    Walk<const T> x;
    Walk<T> out;
};
template <class T> __global__ void copied(const __grid_constant__ Copied<T> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.x.step, a.out.step};
    each_element(
        a.count, a.axes, steps,
        [&](const Places<2> &p, u32) { return a.x.at[p.at[0]]; },
        [&](const Places<2> &p, T x) { a.out.at[p.at[1]] = x; });
}

// Entry i of an axis of the result is entry i - shift of the source; past its ends come zeros, its own entries in turn,
// or its mirror image.
enum { ZEROS, AROUND, MIRRORED };
template <class T> struct Shifted {
    i64 count, rank, how;
    i64 size[5], source_size[5], shift[5], step[5];  // the result is dense
    const T *x;
    T *out;
};
template <class T> __global__ void shifted(const __grid_constant__ Shifted<T> a) {
    wait_for_earlier();
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count) return;
    u32 rest = i;
    i64 from = 0;
    bool inside = true;
    for (int axis = (int)a.rank - 1; axis >= 0; axis--) {
        const u32 size = (u32)a.size[axis];
        const i64 n = a.source_size[axis];
        i64 at = (i64)(rest % size) - a.shift[axis];
        rest /= size;
        if (a.how == AROUND) at = (at % n + n) % n;
        if (a.how == MIRRORED) at = at < 0 ? -at : at >= n ? 2 * (n - 1) - at : at;
        inside = inside && at >= 0 && at < n;
        from += at * a.step[axis];
    }
    a.out[i] = inside ? a.x[from] : T(0);
}

// ------------------------------------------------------------------------------------------------------- rows

// One block for each number: row `ids[i]` of a table becomes row i.
template <class T, class Id> struct Gather {
    i64 rows, columns, row_step, column_step;
    Axes axes;  // of the ids
    Walk<const T> table;
    Walk<const Id> ids;
    Walk<float> out;
    Fault fault;
};
template <class T, class Id> __global__ void gather(const __grid_constant__ Gather<T, Id> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.table.step, a.ids.step, a.out.step};
    const Places<3> p = places(a.axes, steps, blockIdx.x);
    const i64 id = a.ids.at[p.at[1]];
    if (id < 0 || id >= a.rows) {
        if (threadIdx.x == 0) note_fault(a.fault, id);
        return;
    }
    const CellReader<T> row = (CellReader<T>)a.table.at + (p.at[0] + id * a.row_step);
    float *out = a.out.at + p.at[2];
    each_column(a.columns, [&](i64 c) { return row[c * a.column_step]; }, [&](i64 c, auto value) { out[c] = to_float(value); });
}

// Row i becomes row `ids[i]` of a table.
template <class T, class Id> struct Scatter {
    i64 rows, columns, row_step, column_step;
    Axes axes;
    Walk<T> table;
    Walk<const Id> ids;
    Walk<const float> x;
    Fault fault;
};
template <class T, class Id> __global__ void scatter(const __grid_constant__ Scatter<T, Id> a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.table.step, a.ids.step, a.x.step};
    const Places<3> p = places(a.axes, steps, blockIdx.x);
    const i64 id = a.ids.at[p.at[1]];
    if (id < 0 || id >= a.rows) {
        if (threadIdx.x == 0) note_fault(a.fault, id);
        return;
    }
    T *row = a.table.at + p.at[0] + id * a.row_step;
    const float *x = a.x.at + p.at[2];
    each_column(a.columns, [&](i64 c) { return x[c * a.column_step]; }, [&](i64 c, float value) { put_cell(row + c, value); });
}

// Row i plus row `ids[i] - first` of a table, if the table has it; `total` rows exist in all.  Adding -0 changes nothing.
struct AddRows {
    i64 first, own, total, columns, x_column_step, row_step, column_step;
    Axes axes;
    Walk<const float> x;
    Walk<const i32> ids;
    Walk<float> out;
    const float *table;
    Fault fault;
};
__global__ void add_rows(const __grid_constant__ AddRows a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.x.step, a.ids.step, a.out.step};
    const Places<3> p = places(a.axes, steps, blockIdx.x);
    const i64 id = a.ids.at[p.at[1]], mine = id - a.first;
    if ((id < 0 || id >= a.total) && threadIdx.x == 0) note_fault(a.fault, id);
    const bool has = mine >= 0 && mine < a.own && id < a.total;
    const float *x = a.x.at + p.at[0];
    float *out = a.out.at + p.at[2];
    for (i64 c = threadIdx.x; c < a.columns; c += blockDim.x)
        out[c] = x[c * a.x_column_step] + (has ? a.table[mine * a.row_step + c * a.column_step] : -0.0f);
}

// ------------------------------------------------------------------------------------------------- triangles

// Entries whose column exceeds their row by `low` to `high`, another number elsewhere.
struct Band {
    i64 count, rows, columns, low, high;
    double other;
    Axes axes;
    Walk<const float> x;
    Walk<float> out;
};
__global__ void band(const __grid_constant__ Band a) {
    wait_for_earlier();
    const i64 *const steps[] = {a.x.step, a.out.step};
    const u32 columns = (u32)a.columns;
    each_element(
        a.count, a.axes, steps,
        [&](const Places<2> &p, u32 i) {
            const i64 over = (i64)(i % columns) - i / columns % (u32)a.rows;
            return over >= a.low && over <= a.high ? a.x.at[p.at[0]] : (float)a.other;
        },
        [&](const Places<2> &p, float x) { a.out.at[p.at[1]] = x; });
}
