// Tiles of tokens: which they are, what they may see, and their numbers as products want them.
#pragma once
#include <sys/mman.h>

#include <cmath>

#include "call.h"
#include "vector.h"

// Under the address sanitizer there are gaps between the pieces, which nobody may touch.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
constexpr size_t GAP = 64;
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) ((void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) ((void)(bytes))
constexpr size_t GAP = 0;
#endif

namespace {

constexpr int T = 64;  // tokens in a tile

// Memory for one thread, handed out in aligned pieces and taken back all at once.
class Arena {
public:
    Arena() = default;
    ~Arena() { release(); }
    Arena(const Arena&) = delete;

    void reserve(size_t wanted) {
        if (wanted <= bytes) return;
        release();
        // Not from the heap, where it would stay in the way of what comes and goes around it.
        void* found = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        if (found == MAP_FAILED) return;
        base = static_cast<char*>(found);
        bytes = wanted;
    }

    template <class N>
    N* take(long count) {
        char* piece = base + used;
        size_t bytes = size_t(count) * sizeof(N);
        used += size_t(round_up(long(bytes), 64)) + GAP;
        ASAN_UNPOISON_MEMORY_REGION(piece, bytes);
        return reinterpret_cast<N*>(piece);
    }
    bool failed() const { return base == nullptr; }
    void reset() {
        used = 0;
        ASAN_POISON_MEMORY_REGION(base, bytes);
    }
    void settle() {
        if (bytes > KEPT) release();
    }

private:
    static constexpr size_t KEPT = size_t(1) << 24;
    char* base = nullptr;
    size_t bytes = 0, used = 0;

    void release() {
        if (!base) return;
        ASAN_UNPOISON_MEMORY_REGION(base, bytes);
        munmap(base, bytes);
        base = nullptr;
        bytes = 0;
    }
};

// Kept from call to call, unless there is much of it: new pages take time to fill.
thread_local Arena own_room;

// One head of one batch row.
struct Head {
    const Call& call;
    long batch, head;
    long step, left, right;  // dilation and window, cut down to what the row holds
    long block;              // queries taken together: fewer where more would waste corners
    const int32_t *start, *stop, *rank, *places;  // of this batch row, or null
    bool holes;
    uint32_t stream;  // of dropout's draws

    Head(const Call& call, long index)
        : call(call), batch(index / call.heads), head(index % call.heads) {
        long n = call.tokens;
        step = least(call.dilation[head], n);
        left = least(call.left, ceil_div(n, step));
        right = least(call.right, ceil_div(n, step));
        block = left + right < 128 ? T / 2 : T;
        start = call.start ? call.start + batch * n : nullptr;
        stop = call.stop ? call.stop + batch * n : nullptr;
        rank = call.rank ? call.rank + batch * (n + 1) : nullptr;
        places = call.places ? call.places + batch * n : nullptr;
        holes = call.holes && call.holes[batch];
        stream = mix(uint32_t(call.seed) + uint32_t(index));
    }

    long globals() const { return rank ? rank[call.tokens] : 0; }
    bool is_global(long at) const { return rank && rank[at + 1] > rank[at]; }
    long from(long at) const { return start ? start[at] : 0; }
    long until(long at) const { return stop ? stop[at] : call.tokens; }

    template <class N>
    N* of(const Tensor& tensor, bool keys = false) const {
        long which = keys ? head / call.group : head;
        return static_cast<N*>(tensor.data) + batch * tensor.batch + which * tensor.head;
    }
    float* row(float* numbers) const {
        return numbers + (batch * call.heads + head) * call.tokens;
    }
};

// Up to T queries. In a lane of tokens `first + step * index` query i sees the lane's tokens
// with index low <= j < high; of gathered keys it sees those at [from, until) not in its window.
struct Rows {
    long count = 0, even = 0;
    int32_t at[T], low[T], high[T], from[T], until[T], window_low[T], window_high[T], residue[T];
    bool ours[T];  // rows that belong to this piece of work; the others are computed elsewhere
    uint32_t stream[T];
    long lowest, highest;  // over the rows that are ours

    // Queries of a lane, each looking into its window.
    void in_window(const Head& head, long first, long index, long number) {
        begin(number);
        for (long i = 0; i < count; i++) {
            long p = first + head.step * (index + i);
            long a = most(index + i - head.left, ceil_div(head.from(p) - first, head.step));
            long b = least(index + i + head.right + 1, ceil_div(head.until(p) - first, head.step));
            set(head, i, p, a, b, !(head.is_global(p) && head.call.global_rows));
            if (head.is_global(p) && !head.call.global_rows) low[i] = high[i] = until[i] = 0;
        }
        finish();
    }

    // All queries from `index` on that are not global, for gathered keys only.
    void plain(const Head& head, long index, long number) {
        begin(number);
        for (long i = 0; i < count; i++)
            set(head, i, index + i, 0, 0, !head.is_global(index + i));
        finish();
    }

    // Global queries, which see their whole document.
    void global(const Head& head, long first, long number) {
        begin(number);
        for (long i = 0; i < count; i++) {
            long p = head.places[first + i];
            set(head, i, p, head.from(p), head.call.causal ? p + 1 : head.until(p), true);
        }
        finish();
    }

    bool any() const { return lowest < highest; }

private:
    void begin(long number) {
        count = number;
        even = round_up(number, 2);
        lowest = 1L << 40;
        highest = 0;
    }

    void set(const Head& head, long i, long p, long a, long b, bool mine) {
        at[i] = int32_t(p);
        low[i] = int32_t(a);
        high[i] = int32_t(most(a, b));
        from[i] = int32_t(head.from(p));
        until[i] = int32_t(head.call.causal ? least(p + 1, head.until(p)) : head.until(p));
        // Beyond the row's ends there is nothing to see: cut there, the sums stay small.
        window_low[i] = int32_t(most(p - head.left * head.step, 0));
        window_high[i] = int32_t(least(p + head.right * head.step, head.call.tokens));
        residue[i] = int32_t(p % head.step);
        ours[i] = mine;
        stream[i] = mix(head.stream + uint32_t(p));
    }

    void finish() {
        for (long i = 0; i < count; i++) {
            if (!ours[i]) low[i] = high[i] = until[i] = 0;
            if (low[i] < high[i]) {
                lowest = least(lowest, low[i]);
                highest = most(highest, high[i]);
            }
        }
    }
};

struct Span {
    long begin, end;
    long size() const { return end - begin; }
};

// Keys in tiles of T, as far as a pass needs them: transposed for scores, in rows for sums.
template <class U>
struct Keys {
    U *key_columns = nullptr, *value_columns = nullptr, *key_rows = nullptr, *value_rows = nullptr;
    int32_t *at = nullptr, *visible = nullptr, *residue = nullptr;
    void* scratch = nullptr;  // one tile as it was fetched
    long first_tile = 0, tiles = 0, total = 0;
    bool gathered = false;
    bool holes = false;

    long count(long tile) const { return least(T, total - tile * T); }

    // The columns of tiles [begin, end) that some of `number` rows may see, in whole vectors; the
    // first of tile `begin` is column 0.
    Span span(const Rows& rows, long first, long number, long begin, long end) const {
        long columns = round_up(least((end - begin) * T, most(total - begin * T, 0)), LANES);
        if (gathered) return {0, columns};
        long low = columns, high = 0, at = (first_tile + begin) * T;
        for (long i = first; i < least(first + number, rows.count); i++)
            if (rows.low[i] < rows.high[i]) {
                low = least(low, rows.low[i] - at);
                high = most(high, rows.high[i] - at);
            }
        high = least(round_up(high, LANES), columns);
        return {least(most(low, 0) / LANES * LANES, high), high};
    }
};

template <class N>
inline void transpose(const N* from, long ld, N* to, long rows, long columns) {
    for (long i = 0; i < rows; i += 16)
        for (long k = 0; k < columns; k++)
            for (long x = i; x < i + 16; x++) to[k * T + x] = from[x * ld + k];
}

// Row-major numbers as the right side of a product along the rows: pairs of rows interleaved.
template <class E, class U>
inline void pair_rows(const E* from, long ld, U* to, long rows, long columns) {
    if constexpr (Unit<E>::per == 1) {
        for (long i = 0; i < rows; i++) std::memcpy(to + i * columns, from + i * ld, columns * 4);
    } else {
        for (long i = 0; i < rows; i += 2)
            for (long j = 0; j < columns; j++)
                to[i / 2 * columns + j] = uint32_t(from[i * ld + j].bits) |
                                          uint32_t(from[(i + 1) * ld + j].bits) << 16;
    }
}

// Rows of tokens lie too far apart for the processor to guess the next.
constexpr long AHEAD = 8;

// Tokens `at` as rows of `width` numbers, zero beyond head_dim and beyond the last token.
template <class N, class E>
inline void fetch(const N* base, long stride, const int32_t* at, long count, long rows, long dim,
                  long width, E* to) {
    for (long i = 0; i < rows; i++) {
        E* row = to + i * width;
        if (i >= count) {
            std::memset(static_cast<void*>(row), 0, size_t(width) * sizeof(E));
            continue;
        }
        const N* token = base + at[i] * stride;
        if (i + AHEAD < count)
            for (long d = 0; d < dim; d += 64 / sizeof(N))
                __builtin_prefetch(base + at[i + AHEAD] * stride + d);
        if constexpr (sizeof(N) == sizeof(E)) {
            std::memcpy(static_cast<void*>(row), token, size_t(dim) * sizeof(E));
        } else {
            for (long d = 0; d < dim; d++) row[d] = widen(token[d]);
        }
        std::memset(static_cast<void*>(row + dim), 0, size_t(width - dim) * sizeof(E));
    }
}

// Set scores [count, span] to -inf where a row, from `first` on, may not see a key; column 0 is the
// first of `tile`.
template <class U>
inline void hide(float* scores, long ld, const Rows& rows, long first, long count,
                 const Keys<U>& keys, long tile, Span span) {
    const int32_t *at = keys.at + tile * T, *visible = keys.visible + tile * T;
    const int32_t* residue = keys.residue + tile * T;
    auto keep = [](float* s, ivec seen) { store(s, seen ? load<vec>(s) : vec{} - HUGE_VALF); };
    long begin = (keys.first_tile + tile) * T, inside = keys.total - tile * T;
    for (long r = 0; r < count; r++) {
        float* s = scores + r * ld;
        long i = first + r;
        if (keys.gathered) {
            for (long j = span.begin; j < span.end; j += W) {
                ivec p = load<ivec>(at + j);
                ivec near = (p >= rows.window_low[i]) & (p <= rows.window_high[i]) &
                            (load<ivec>(residue + j) == rows.residue[i]);
                keep(s + j, (p >= rows.from[i]) & (p < rows.until[i]) &
                                (count_up() < int32_t(inside - j)) & ~near);
            }
            continue;
        }
        // Between the ends of its window a row sees everything but holes.
        long low = rows.low[i] - begin, high = rows.high[i] - begin;
        auto mask = [&](long from, long until) {
            for (long j = from; j < until; j += W)
                keep(s + j, (count_up() >= int32_t(low - j)) & (count_up() < int32_t(high - j)) &
                                (load<ivec>(visible + j) != 0));
        };
        if (keys.holes) {
            mask(span.begin, span.end);
        } else {
            mask(span.begin, least(round_up(low, LANES), span.end));
            mask(most(floor_div(high, LANES) * LANES, span.begin), span.end);
        }
    }
}

}  // namespace
