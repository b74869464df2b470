#include "noise.h"

#include "vectors.h"

typedef uint32_t words __attribute__((vector_size(32)));

/* MurmurHash3's finaliser, of words and of vectors of them. */
#define MIXED(x)                         \
    do {                                 \
        x = (x ^ x >> 16) * 0x85EBCA6Bu; \
        x = (x ^ x >> 13) * 0xC2B2AE35u; \
        x = x ^ x >> 16;                 \
    } while (0)

INLINE uint32_t mix(uint32_t x) {
    MIXED(x);
    return x;
}

void noise_at(uint64_t seed, uint32_t place, float *out, int size) {
    const uint32_t low = (uint32_t)seed, high = (uint32_t)(seed >> 32);
    const uint32_t start = mix(low + 0x9E3779B9u);
    const uint32_t key = mix(start ^ (mix(place * 0x85EBCA77u + 1) + mix(start + high)));
    const uint32_t other = mix(key + 0x27D4EB2Fu);
    for (int j = 0; j < size; j += LANES) {
        words x;
        for (int l = 0; l < LANES; l++) x[l] = (uint32_t)(j + l) * 0x9E3779B1u + key;
        MIXED(x);
        x ^= other;
        MIXED(x);
        vec uniform = (__builtin_convertvector((ints)(x >> 9), vec) + 0.5f) * 0x1p-23f;
        vec gumbel = -logarithm(-logarithm(uniform));
        if (j + LANES <= size) store(out + j, gumbel);
        else
            for (int l = 0; j + l < size; l++) out[j + l] = gumbel[l];
    }
}
