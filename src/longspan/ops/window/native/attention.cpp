// Window attention on the CPU, forward and backward: compiled once per target, see dispatch.cpp.
//
// The work of one head falls into
// - the band: tiles of queries against the keys their windows reach, and the gathered global keys.
//   With dilation the tokens of one residue class form a lane, an ordinary sequence of its own;
// - the global rows: gathered global queries against all keys of their documents.
// A row belongs to exactly one of them, so no two pieces of work write the same row.
//
// Backward, the band is walked in chunks of query tiles, each adding to the gradients of the keys
// it reaches. Chunks that reach the same keys run one after the other, in an order that does not
// depend on the number of threads; so do the global keys and rows behind them.
#include "tiles.h"

namespace {

constexpr long GROUP = 16;  // tiles whose scores are held at a time
constexpr long COLUMNS = 2 * GROUP * T;  // of these scores: keys of the window, and global ones
constexpr float LOG2E = 1.44269504f;

template <class N, class E>
class Pass {
    using U = typename Unit<E>::type;
    static constexpr int per = Unit<E>::per;

public:
    explicit Pass(const Call& call) : call(call) {
        dim = call.head_dim;
        width = round_up(dim, LANES);
        depth = ceil_div(dim, per);
        sharp = float(call.scale) * LOG2E;
        for (long b = 0; call.rank && b < call.batch; b++)
            most_globals = most(most_globals, call.rank[b * (call.tokens + 1) + call.tokens]);
        for (long h = 0; h < call.heads; h++) {
            Head head(call, h);
            long tiles = ceil_div(ceil_div(call.tokens, head.step), T);
            reach = most(reach, least(tiles, ceil_div(head.left, T) + ceil_div(head.right, T)));
            longest = most(longest, tiles);
        }
        global_tiles = ceil_div(most_globals, T);
    }

    bool forward() {
        // Every chunk packs the keys of its neighbours too, so few of them, but enough for all.
        chunk = most(1, least(32, call.batch * call.heads * longest / (8 * call.threads)));
        bool done = run(chunks(0, 1), [&](Arena& room, long index, long piece) {
            Head head(call, index);
            long count = lane_chunks(head, 0, 1);
            band_forward(room, head, piece / count, piece % count);
        });
        if (call.global_rows && most_globals)
            done = done && run(global_tiles, [&](Arena& room, long head, long piece) {
                       rows_forward(room, Head(call, head), piece);
                   });
        return done;
    }

    bool backward() {
        chunk = most(4, least(16, reach));
        long blocks = ceil_div(call.tokens, T);
        bool done = run(blocks, [&](Arena&, long head, long piece) {
            measure(Head(call, head), piece * T, least(T, call.tokens - piece * T));
        });
        // Chunks of one colour reach no key in common.
        long colours = ceil_div(chunk + reach, chunk);
        for (long colour = 0; done && colour < colours; colour++) {
            done = run(chunks(colour, colours), [&](Arena& room, long index, long piece) {
                Head head(call, index);
                long count = lane_chunks(head, colour, colours);
                if (count)
                    band_backward(room, head, piece / count, colour + piece % count * colours);
            });
        }
        if (!done || !most_globals) return done;
        done = run(global_tiles, [&](Arena& room, long head, long piece) {
            columns_backward(room, Head(call, head), piece);
        });
        if (!done || !call.global_rows) return done;
        return run(blocks + global_tiles, [&](Arena& room, long head, long piece) {
            if (piece < blocks) rows_backward_keys(room, Head(call, head), piece);
            else rows_backward_queries(room, Head(call, head), piece - blocks);
        });
    }

private:
    const Call& call;
    long dim, width, depth;  // head_dim, padded, and in units along a sum
    float sharp;             // turns scores into exponents of 2
    long most_globals = 0, global_tiles = 0, reach = 0, longest = 0, chunk = 1;

    // Chunks of a head's lane, every colours-th; and how many all lanes of a head have at most.
    long lane_chunks(const Head& head, long colour, long colours) const {
        long count = ceil_div(ceil_div(call.tokens, head.step), chunk * T);
        return most(ceil_div(count - colour, colours), 0);
    }

    long chunks(long colour, long colours) const {
        long pieces = 0;
        for (long h = 0; h < call.heads; h++) {
            Head head(call, h);
            pieces = most(pieces, head.step * lane_chunks(head, colour, colours));
        }
        return pieces;
    }

    // `task(arena, head, piece)` for every head of the batch and every piece, on all threads.
    template <class F>
    bool run(long pieces, F task) {
        bool done = true;
        long total = call.batch * call.heads * pieces;
        if (total == 0) return done;
#pragma omp parallel num_threads(int(least(call.threads, total)))
        {
            Arena& room = own_room;
            room.reserve(room_needed());
#pragma omp for schedule(dynamic)
            for (long i = 0; i < total; i++) {
                if (room.failed()) {
#pragma omp atomic write
                    done = false;
                } else {
                    room.reset();
                    task(room, i / pieces, i % pieces);
                }
            }
            room.settle();
        }
        return done;
    }

    size_t room_needed() const {
        long tiles = most(chunk + reach + 2, GROUP) + global_tiles + 1;
        long tile = T * width * 4;
        return size_t(tiles * (6 * tile + 3 * T * 4 + 1024) + 12 * tile + T * GROUP * T * 8 +
                      16 * T * T * 4 + (1 << 14));
    }

    // ---- keys

    enum Wanted { KEY_COLUMNS = 1, VALUE_COLUMNS = 2, KEY_ROWS = 4, VALUE_ROWS = 8 };

    Keys<U> make_keys(Arena& room, long tiles, int wanted) const {
        Keys<U> keys;
        long size = tiles * T * width / per;
        if (wanted & KEY_COLUMNS) keys.key_columns = room.take<U>(size);
        if (wanted & VALUE_COLUMNS) keys.value_columns = room.take<U>(size);
        if (wanted & KEY_ROWS) keys.key_rows = room.take<U>(size);
        if (wanted & VALUE_ROWS) keys.value_rows = room.take<U>(size);
        keys.at = room.take<int32_t>(tiles * T);
        keys.visible = room.take<int32_t>(tiles * T);
        keys.residue = room.take<int32_t>(tiles * T);
        keys.scratch = room.take<E>(T * width);
        return keys;
    }

    // Tiles [begin, end) of a lane.
    void fill_lane(const Head& head, Keys<U>& keys, long first, long step, long begin,
                   long end) const {
        long length = ceil_div(call.tokens - first, step);
        keys.first_tile = begin;
        keys.tiles = most(end - begin, 0);
        keys.total = most(least(length, end * T) - begin * T, 0);
        keys.holes = head.holes;
        for (long j = 0; j < keys.tiles * T; j++) {
            bool there = j < keys.total;
            long at = there ? first + step * (begin * T + j) : 0;
            keys.at[j] = int32_t(at);
            keys.visible[j] = there && (!head.stop || head.stop[at] > 0);
        }
        pack(head, keys);
    }

    // Global keys [begin, end) of the row's list.
    void fill_gathered(const Head& head, Keys<U>& keys, long begin, long end) const {
        keys.gathered = true;
        keys.total = most(end - begin, 0);
        keys.tiles = ceil_div(keys.total, T);
        for (long j = 0; j < keys.tiles * T; j++) {
            keys.at[j] = j < keys.total ? head.places[begin + j] : 0;
            keys.residue[j] = int32_t(keys.at[j] % head.step);
        }
        pack(head, keys);
    }

    void pack(const Head& head, Keys<U>& keys) const {
        E* rows = static_cast<E*>(keys.scratch);
        const N* key = head.of<N>(call.key, true);
        const N* value = head.of<N>(call.value, true);
        long size = T * width / per;
        for (long t = 0; t < keys.tiles; t++) {
            long count = keys.count(t);
            auto one = [&](const N* base, long stride, U* columns, U* in_rows) {
                if (!columns && !in_rows) return;
                fetch(base, stride, keys.at + t * T, count, T, dim, width, rows);
                const U* units = reinterpret_cast<const U*>(rows);
                if (columns) transpose(units, width / per, columns + t * size, T, depth);
                if (in_rows) pair_rows(rows, width, in_rows + t * size, T, width);
            };
            one(key, call.key.token, keys.key_columns, keys.key_rows);
            one(value, call.value.token, keys.value_columns, keys.value_rows);
        }
    }

    // The global keys that some of the queries may see, as a range of the row's list.
    void global_range(const Head& head, const Rows& rows, long& begin, long& end) const {
        long low = call.tokens, high = 0;
        for (long i = 0; i < rows.count; i++)
            if (rows.from[i] < rows.until[i]) {
                low = least(low, rows.from[i]);
                high = most(high, rows.until[i]);
            }
        begin = head.rank && low < high ? head.rank[low] : 0;
        end = head.rank && low < high ? head.rank[high] : 0;
    }

    // ---- forward

    struct State {
        float *sum, *scores;  // [T, width]; [STRIP, COLUMNS]
        E* weights;           // [STRIP, COLUMNS]; the scores themselves in float32
        E* query;             // [T, width]
        float top[T], total[T];
        bool fresh = true;
    };

    State begin_rows(Arena& room, const Head& head, const Rows& rows) const {
        State state;
        state.sum = room.take<float>(T * width);
        state.scores = room.take<float>(STRIP * COLUMNS);
        if constexpr (per == 1) state.weights = state.scores;
        else state.weights = room.take<E>(STRIP * COLUMNS);
        state.query = room.take<E>(T * width);
        restart(state, head, rows);
        return state;
    }

    void restart(State& state, const Head& head, const Rows& rows) const {
        state.fresh = true;
        for (long i = 0; i < T; i++) state.top[i] = -HUGE_VALF, state.total[i] = 0;
        fetch(head.of<N>(call.query), call.query.token, rows.at, rows.count, rows.even, dim, width,
              state.query);
    }

    // Some tiles of keys, and where their scores stand.
    struct Part {
        const Keys<U>* keys;
        long begin, end;  // tiles
        float* scores;
        E* weights;
        Span span{0, 0};  // columns that some row of the strip may see, from tile `begin` on
    };

    // Take tiles of both into account, a strip of rows at a time: its scores stay in the innermost
    // cache while the keys stream by.
    void absorb(State& state, const Rows& rows, const Keys<U>& near, Span tiles,
                const Keys<U>& far = {}, Span far_tiles = {0, 0}) const {
        long size = most(tiles.size(), far_tiles.size());
        for (long t = 0; t < size; t += GROUP) {
            auto part = [&](const Keys<U>& keys, Span all, long column) {
                long begin = least(all.begin + t, all.end), end = least(begin + GROUP, all.end);
                return Part{&keys, begin, end, state.scores + column, state.weights + column};
            };
            Part parts[2] = {part(near, tiles, 0), part(far, far_tiles, COLUMNS / 2)};
            for (long i = 0; i < rows.even; i += STRIP)
                absorb_strip(state, rows, i, least(STRIP, rows.even - i), parts);
            state.fresh = false;
        }
    }

    void absorb_strip(State& state, const Rows& rows, long first, long count,
                      Part (&parts)[2]) const {
        long size = T * width / per;
        const U* query = reinterpret_cast<const U*>(state.query + first * width);
        for (Part& part : parts) {
            const Keys<U>& keys = *part.keys;
            part.span = keys.span(rows, first, count, part.begin, part.end);
            for (long j = part.span.begin, next; j < part.span.end; j = next) {
                next = least(round_up(j + 1, T), part.span.end);
                product<false>(query, width / per, 1,
                               keys.key_columns + (part.begin + j / T) * size + j % T, T, depth,
                               part.scores + j, COLUMNS, count, next - j);
            }
            hide(part.scores, COLUMNS, rows, first, least(count, rows.count - first), keys,
                 part.begin, part.span);
        }
        for (long i = 0; i < least(count, rows.count - first); i++)
            weigh(state, rows, first + i, i * COLUMNS, parts);
        bool fresh = state.fresh;
        for (const Part& part : parts) {
            if (part.span.size() == 0 && !fresh) continue;
            auto add = fresh ? product<false, U> : product<true, U>;
            add(reinterpret_cast<const U*>(part.weights + part.span.begin), COLUMNS / per, 1,
                part.keys->value_rows + (part.begin * T + part.span.begin) / per * width, width,
                part.span.size() / per, state.sum + first * width, width, count, width);
            fresh = false;
        }
    }

    // Scores of one row become weights, relative to the largest so far.
    void weigh(State& state, const Rows& rows, long row, long offset,
               const Part (&parts)[2]) const {
        vec high = vec{} - HUGE_VALF;
        for (const Part& part : parts)
            for (long j = part.span.begin; j < part.span.end; j += W) {
                vec x = load<vec>(part.scores + offset + j);
                high = x > high ? x : high;
            }
        float before = state.top[row], top = largest_of(high) * sharp;
        top = top > before ? top : before;
        float base = top == -HUGE_VALF ? 0.0f : top;
        vec sum{};
        const bool drops = call.drop;
        for (const Part& part : parts)
            for (long j = part.span.begin; j < part.span.end; j += W) {
                vec p = exp2<per>(load<vec>(part.scores + offset + j) * sharp - base);
                sum += p;
                if (drops)
                    p = (vec)((ivec)p & kept(rows.stream[row], part.keys->at + part.begin * T + j));
                narrow_vector(p, part.weights + offset + j);
            }
        float factor = before == -HUGE_VALF ? 0.0f : exp2f(before - base);
        state.total[row] = state.total[row] * factor + sum_of(sum);
        state.top[row] = top;
        if (!state.fresh && factor != 1.0f)
            for (long d = 0; d < width; d++) state.sum[row * width + d] *= factor;
    }

    ivec kept(uint32_t row, const int32_t* at) const {
        uvec draw = mix(row ^ load<uvec>(at) * GOLDEN) >> 8;
        return (ivec)(draw >= uint32_t(call.drop));
    }

    void finish_rows(const State& state, const Head& head, const Rows& rows) const {
        N* out = head.of<N>(call.out);
        float* lse = head.row(call.lse);
        for (long i = 0; i < rows.count; i++) {
            if (!rows.ours[i]) continue;
            float total = state.total[i], share = float(call.boost) / total;
            N* to = out + rows.at[i] * call.out.token;
            const float* sum = state.sum + i * width;
            lse[rows.at[i]] = total == 0 ? HUGE_VALF : state.top[i] + log2f(total);
            if (total == 0) {  // it may not even have been summed up
                std::memset(static_cast<void*>(to), 0, size_t(dim) * sizeof(N));
                continue;
            }
            long d = 0;
            for (; d + W <= dim; d += W) narrow_vector(load<vec>(sum + d) * share, to + d);
            for (; d < dim; d++) narrow(sum[d] * share, to[d]);
        }
    }

    void band_forward(Arena& room, const Head& head, long first, long which) const {
        long begin = which * chunk * T;
        long length = first < head.step ? ceil_div(call.tokens - first, head.step) : 0;
        long end = least(begin + chunk * T, length);
        if (begin >= end) return;
        Keys<U> keys = make_keys(room, chunk + reach + 2, KEY_COLUMNS | VALUE_ROWS);
        fill_lane(head, keys, first, head.step, most(0, floor_div(begin - head.left, T)),
                  ceil_div(least(end + head.right, length), T));
        Rows rows;
        Keys<U> globals = make_keys(room, global_tiles, KEY_COLUMNS | VALUE_ROWS);
        long known = chunk_globals(head, globals, first, begin, end);
        State state{};
        for (long index = begin; index < end; index += head.block) {
            rows.in_window(head, first, index, least(head.block, end - index));
            if (index == begin) state = begin_rows(room, head, rows);
            else restart(state, head, rows);
            Span near{0, 0}, far{0, 0};
            if (rows.any())
                near = {rows.lowest / T - keys.first_tile,
                        ceil_div(rows.highest, T) - keys.first_tile};
            long from, until;
            global_range(head, rows, from, until);
            if (from < until) far = {(from - known) / T, ceil_div(until - known, T)};
            absorb(state, rows, keys, near, globals, far);
            finish_rows(state, head, rows);
        }
    }

    // Gather the global keys that a chunk of a lane may see; where in the list they begin.
    long chunk_globals(const Head& head, Keys<U>& globals, long first, long begin,
                       long end) const {
        long low = 1L << 40, high = 0, from, until;
        if (!head.globals()) return 0;
        Rows rows;
        for (long index = begin; index < end; index += head.block) {
            rows.in_window(head, first, index, least(head.block, end - index));
            global_range(head, rows, from, until);
            if (from < until) low = least(low, from), high = most(high, until);
        }
        if (low >= high) return 0;
        fill_gathered(head, globals, low, high);
        return low;
    }

    void rows_forward(Arena& room, const Head& head, long piece) const {
        long number = least(T, head.globals() - piece * T);
        if (number <= 0) return;
        Rows rows;
        rows.global(head, piece * T, number);
        Keys<U> keys = make_keys(room, GROUP, KEY_COLUMNS | VALUE_ROWS);
        State state = begin_rows(room, head, rows);
        for (long t = rows.lowest / T; t * T < rows.highest; t += GROUP) {
            fill_lane(head, keys, 0, 1, t, least(t + GROUP, ceil_div(rows.highest, T)));
            absorb(state, rows, keys, {0, keys.tiles});
        }
        finish_rows(state, head, rows);
    }

    // ---- backward

    // Queries with their gradients, as both sides of products need them.
    struct Queries {
        E *query, *grad;            // [T, width]
        U *query_rows, *grad_rows;  // pairs of rows; the same in float32
        float lse[T], delta[T];
        float *scores, *slopes;     // [T, T]
        E *weights, *changes;       // [T, T]: weights that met the values, gradients of scores
        U *weights_down, *changes_down;
        float* sum;                 // [T, width]: gradient of the queries
    };

    Queries make_queries(Arena& room) const {
        Queries q;
        q.query = room.take<E>(T * width);
        q.grad = room.take<E>(T * width);
        q.scores = room.take<float>(T * T);
        q.slopes = room.take<float>(T * T);
        q.sum = room.take<float>(T * width);
        if constexpr (per == 1) {
            q.query_rows = q.query, q.grad_rows = q.grad;
            q.weights = q.weights_down = q.scores, q.changes = q.changes_down = q.slopes;
        } else {
            q.query_rows = room.take<U>(T * width), q.grad_rows = room.take<U>(T * width);
            q.weights = room.take<E>(T * T), q.changes = room.take<E>(T * T);
            q.weights_down = room.take<U>(T * T), q.changes_down = room.take<U>(T * T);
        }
        return q;
    }

    void fill_queries(const Head& head, const Rows& rows, Queries& q, bool for_keys) const {
        fetch(head.of<N>(call.query), call.query.token, rows.at, rows.count, rows.even, dim, width,
              q.query);
        fetch(head.of<N>(call.grad), call.grad.token, rows.at, rows.count, rows.even, dim, width,
              q.grad);
        if (per > 1 && for_keys) {
            pair_rows(q.query, width, q.query_rows, rows.even, width);
            pair_rows(q.grad, width, q.grad_rows, rows.even, width);
        }
        for (long i = 0; i < rows.even; i++) {
            bool live = i < rows.count && rows.ours[i];
            q.lse[i] = live ? head.row(call.lse)[rows.at[i]] : HUGE_VALF;
            q.delta[i] = live ? head.row(call.delta)[rows.at[i]] : 0.0f;
        }
    }

    // delta = out . grad, of every row.
    void measure(const Head& head, long begin, long count) const {
        const N* out = head.of<N>(call.out);
        const N* grad = head.of<N>(call.grad);
        for (long i = begin; i < begin + count; i++) {
            const N *a = out + i * call.out.token, *b = grad + i * call.grad.token;
            float parts[LANES] = {}, sum = 0;
            long d = 0;
            for (; d + LANES <= dim; d += LANES)
                for (int x = 0; x < LANES; x++) parts[x] += widen(a[d + x]) * widen(b[d + x]);
            for (; d < dim; d++) sum += widen(a[d]) * widen(b[d]);
            for (int x = 0; x < LANES; x++) sum += parts[x];
            head.row(call.delta)[i] = sum;
        }
    }

    // Weights and gradients of scores between some queries and a tile of keys.
    void compare(const Rows& rows, Queries& q, const Keys<U>& keys, long t, bool for_keys) const {
        Span span = keys.span(rows, 0, rows.count, t, t + 1);
        long at = t * (T * width / per) + span.begin;
        product<false>(reinterpret_cast<const U*>(q.query), width / per, 1, keys.key_columns + at, T,
                       depth, q.scores + span.begin, T, rows.even, span.size());
        hide(q.scores, T, rows, 0, rows.count, keys, t, span);
        product<false>(reinterpret_cast<const U*>(q.grad), width / per, 1, keys.value_columns + at,
                       T, depth, q.slopes + span.begin, T, rows.even, span.size());
        float boost = float(call.boost), scale = float(call.scale);
        for (long i = 0; i < rows.even; i++) {
            float lse = q.lse[i], delta = q.delta[i];
            uint32_t stream = i < rows.count ? rows.stream[i] : 0;
            for (long j = span.begin; j < span.end; j += W) {
                vec p = exp2<per>(load<vec>(q.scores + i * T + j) * sharp - lse);
                vec slope = load<vec>(q.slopes + i * T + j) * boost;
                vec met = p * boost;
                if (call.drop) {
                    ivec keep = kept(stream, keys.at + t * T + j);
                    slope = (vec)((ivec)slope & keep);
                    met = (vec)((ivec)met & keep);
                }
                narrow_vector(met, q.weights + i * T + j);
                narrow_vector(p * scale * (slope - delta), q.changes + i * T + j);
            }
        }
        if (per > 1 && for_keys) {
            pair_rows(q.weights, T, q.weights_down, rows.even, T);
            pair_rows(q.changes, T, q.changes_down, rows.even, T);
        }
    }

    // Gradients of the tile's keys and values, added to sums [T, width].
    void add_to_keys(const Rows& rows, const Queries& q, const Keys<U>& keys, long t, float* key,
                     float* value) const {
        Span span = keys.span(rows, 0, rows.count, t, t + 1);
        long at = span.begin * width;
        product<true>(q.changes_down + span.begin, 1, T, q.query_rows, width, rows.even / per,
                      key + at, width, span.size(), width);
        product<true>(q.weights_down + span.begin, 1, T, q.grad_rows, width, rows.even / per,
                      value + at, width, span.size(), width);
    }

    void add_to_queries(const Rows& rows, Queries& q, const Keys<U>& keys, long t) const {
        Span span = keys.span(rows, 0, rows.count, t, t + 1);
        product<true>(reinterpret_cast<const U*>(q.changes) + span.begin / per, T / per, 1,
                      keys.key_rows + (t * T + span.begin) / per * width, width, span.size() / per,
                      q.sum, width, rows.even, width);
    }

    void write_queries(const Head& head, const Rows& rows, const Queries& q) const {
        N* grad = head.of<N>(call.grad_query);
        for (long i = 0; i < rows.count; i++)
            if (rows.ours[i])
                for (long d = 0; d < dim; d++)
                    narrow(q.sum[i * width + d], grad[rows.at[i] * call.grad_query.token + d]);
    }

    void write_keys(const Head& head, const Keys<U>& keys, const float* key,
                    const float* value) const {
        float* to_key = head.of<float>(call.grad_key);
        float* to_value = head.of<float>(call.grad_value);
        for (long j = 0; j < keys.total; j++)
            for (long d = 0; d < dim; d++) {
                to_key[keys.at[j] * call.grad_key.token + d] += key[j * width + d];
                to_value[keys.at[j] * call.grad_value.token + d] += value[j * width + d];
            }
    }

    float* zeros(Arena& room, long count) const {
        float* numbers = room.take<float>(count);
        std::memset(numbers, 0, size_t(count) * 4);
        return numbers;
    }

    void band_backward(Arena& room, const Head& head, long first, long which) const {
        long begin = which * chunk * T;
        long length = first < head.step ? ceil_div(call.tokens - first, head.step) : 0;
        long end = least(begin + chunk * T, length);
        if (begin >= end) return;
        constexpr int wanted = KEY_COLUMNS | VALUE_COLUMNS | KEY_ROWS;
        Keys<U> keys = make_keys(room, chunk + reach + 2, wanted);
        fill_lane(head, keys, first, head.step, most(0, floor_div(begin - head.left, T)),
                  ceil_div(least(end + head.right, length), T));
        Keys<U> globals = make_keys(room, global_tiles, wanted);
        long known = chunk_globals(head, globals, first, begin, end);
        float* key = zeros(room, keys.tiles * T * width);
        float* value = zeros(room, keys.tiles * T * width);
        Queries q = make_queries(room);
        Rows rows;
        for (long index = begin; index < end; index += head.block) {
            rows.in_window(head, first, index, least(head.block, end - index));
            fill_queries(head, rows, q, true);
            std::memset(q.sum, 0, size_t(T * width) * 4);
            long low = rows.any() ? rows.lowest / T - keys.first_tile : 0;
            long high = rows.any() ? ceil_div(rows.highest, T) - keys.first_tile : 0;
            for (long t = low; t < high; t++) {
                compare(rows, q, keys, t, true);
                add_to_keys(rows, q, keys, t, key + t * T * width, value + t * T * width);
                add_to_queries(rows, q, keys, t);
            }
            long from, until;
            global_range(head, rows, from, until);
            high = from < until ? ceil_div(until - known, T) : 0;
            for (long t = from < until ? (from - known) / T : 0; t < high; t++) {
                compare(rows, q, globals, t, false);
                add_to_queries(rows, q, globals, t);
            }
            write_queries(head, rows, q);
        }
        write_keys(head, keys, key, value);
    }

    // Gradients of a tile of global keys, from all queries whose windows do not hold them.
    void columns_backward(Arena& room, const Head& head, long piece) const {
        long begin = piece * T, end = least(begin + T, head.globals());
        if (begin >= end) return;
        Keys<U> keys = make_keys(room, 1, KEY_COLUMNS | VALUE_COLUMNS);
        fill_gathered(head, keys, begin, end);
        float *key = zeros(room, T * width), *value = zeros(room, T * width);
        Queries q = make_queries(room);
        Rows rows;
        long low = head.from(keys.at[0]), high = head.until(keys.at[end - begin - 1]);
        if (call.causal) low = most(low, keys.at[0]);
        for (long index = low; index < high; index += T) {
            rows.plain(head, index, least(T, high - index));
            fill_queries(head, rows, q, true);
            compare(rows, q, keys, 0, true);
            add_to_keys(rows, q, keys, 0, key, value);
        }
        write_keys(head, keys, key, value);
    }

    // What global queries add to the gradients of a tile of keys.
    void rows_backward_keys(Arena& room, const Head& head, long piece) const {
        long low = call.tokens, high = 0;
        for (long at = piece * T; at < least(piece * T + T, call.tokens); at++)
            if (head.until(at) > 0) {
                low = least(low, call.causal ? most(at, head.from(at)) : head.from(at));
                high = most(high, head.until(at));
            }
        if (low >= high || !head.globals()) return;
        long begin = head.rank[low], end = head.rank[high];
        if (begin >= end) return;
        Keys<U> keys = make_keys(room, 1, KEY_COLUMNS | VALUE_COLUMNS);
        fill_lane(head, keys, 0, 1, piece, piece + 1);
        float *key = zeros(room, T * width), *value = zeros(room, T * width);
        Queries q = make_queries(room);
        Rows rows;
        for (long index = begin; index < end; index += T) {
            rows.global(head, index, least(T, end - index));
            fill_queries(head, rows, q, true);
            compare(rows, q, keys, 0, true);
            add_to_keys(rows, q, keys, 0, key, value);
        }
        write_keys(head, keys, key, value);
    }

    void rows_backward_queries(Arena& room, const Head& head, long piece) const {
        long number = least(T, head.globals() - piece * T);
        if (number <= 0) return;
        Rows rows;
        rows.global(head, piece * T, number);
        Keys<U> keys = make_keys(room, 1, KEY_COLUMNS | VALUE_COLUMNS | KEY_ROWS);
        Queries q = make_queries(room);
        fill_queries(head, rows, q, false);
        std::memset(q.sum, 0, size_t(T * width) * 4);
        for (long t = rows.lowest / T; t * T < rows.highest; t++) {
            fill_lane(head, keys, 0, 1, t, t + 1);
            compare(rows, q, keys, 0, false);
            add_to_queries(rows, q, keys, 0);
        }
        write_queries(head, rows, q);
    }
};

template <class N, class E>
int attend(const Call& call, bool back) {
    Pass<N, E> pass(call);
    return (back ? pass.backward() : pass.forward()) ? 0 : 1;
}

int run(const Call& call, bool back) {
    switch (call.dtype) {
        case 0: return attend<float, float>(call, back);
#if defined(__AVX512BF16__)
        case 1: return attend<bf16, bf16>(call, back);
#else
        case 1: return attend<bf16, float>(call, back);
#endif
        default: return attend<f16, float>(call, back);
    }
}

}  // namespace

#define NAME(prefix, target) prefix##target
#define EXPORT(prefix, target) NAME(prefix, target)
int EXPORT(attention_, TARGET)(const Call& call, bool back) { return run(call, back); }
