// The library's plain C interface: picks the code compiled for the best of what this CPU has.
#include "call.h"

#define DECLARE(target) int attention_##target(const Call& call, bool back);
#if defined(__x86_64__)
DECLARE(avx512_bf16)
DECLARE(avx512)
DECLARE(avx2)
#endif
DECLARE(plain)

namespace {

struct Target {
    const char* name;
    int (*attention)(const Call&, bool);
    bool (*supported)();
};

#if defined(__x86_64__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
#endif

const Target targets[] = {
#if defined(__x86_64__)
    {"avx512_bf16", attention_avx512_bf16,
     [] { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }},
    {"avx512", attention_avx512, has_avx512},
    {"avx2", attention_avx2,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {"plain", attention_plain, [] { return true; }},
};

}  // namespace

extern "C" {

// A hash of the sources, so that a library built from others is noticed.
const char* longspan_source() { return SOURCE; }

// Name of the n-th target this CPU can run, best first; null behind the last.
const char* longspan_target(int64_t n) {
    for (const Target& target : targets)
        if (target.supported() && n-- == 0) return target.name;
    return nullptr;
}

// 0, or 1 if memory ran out.
int longspan_attention(const Call* call, int64_t n, int64_t back) {
    for (const Target& target : targets)
        if (target.supported() && n-- == 0) return target.attention(*call, back != 0);
    return 1;
}
}
