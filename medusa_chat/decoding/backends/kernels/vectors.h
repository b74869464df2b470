/* Vectors of eight floats, and the functions of them that libm has for one. */

#pragma once

#include <stddef.h>
#include <stdint.h>
#if defined(__AVX2__) && defined(__FMA__) && defined(__clang__)
#include <immintrin.h> /* GCC's takes half a second to read: more than most files here */
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "compiler.h"

#define LANES 8

typedef float vec __attribute__((vector_size(32)));
typedef float loose __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(32)));

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec v) { *(loose *)p = v; }
INLINE vec all(float x) { return (vec){x, x, x, x, x, x, x, x}; }

/* Lanes of two vectors, those of the second counted from LANES on. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

/* LANES words of LANES rows, the words of one place behind each other, `apart`. */
INLINE void turn(const float *const *k, int d, float *to, ptrdiff_t apart) {
    vec a[8], b[8];
    _Pragma("GCC unroll 4") for (int i = 0; i < 8; i += 2) {
        const vec x = load(k[i] + d), y = load(k[i + 1] + d);
        a[i] = SHUFFLE(x, y, 0, 8, 1, 9, 4, 12, 5, 13);
        a[i + 1] = SHUFFLE(x, y, 2, 10, 3, 11, 6, 14, 7, 15);
    }
    _Pragma("GCC unroll 2") for (int i = 0; i < 8; i += 4)
        _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = SHUFFLE(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[i + 2 * j + 1] = SHUFFLE(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        store(to + i * apart, SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
        store(to + (i + 4) * apart, SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
    }
}

/* a * b + c, rounded once where the CPU can: never left to the compiler, which would choose anew
   in each place. */
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX2__) && defined(__FMA__) && defined(__clang__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return __builtin_ia32_vfmaddps256(a, b, c);
#elif defined(__aarch64__)
    typedef union {
        vec whole;
        float32x4_t half[2];
    } Halves;
    Halves x = {a}, y = {b}, z = {c};
    z.half[0] = vfmaq_f32(z.half[0], x.half[0], y.half[0]);
    z.half[1] = vfmaq_f32(z.half[1], x.half[1], y.half[1]);
    return z.whole;
#else
    return a * b + c;
#endif
}

/* Vectors as wide as the CPU has them, for the loops that take most of the time. A test builds the
   library with vectors of 16 for a CPU that has those of 8. */
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_ZMM 1
#else
#define HAS_ZMM 0
#endif
#ifndef WIDTH
#define WIDTH (HAS_ZMM ? 16 : LANES)
#endif

/* By what vectors are computed, for who has to do without it. */
#define PORTABLE "portable C"
#if HAS_ZMM
#define VECTORS_BY "AVX-512"
#elif defined(__AVX2__) && defined(__FMA__)
#define VECTORS_BY "AVX2"
#else
#define VECTORS_BY PORTABLE
#endif

typedef float wide __attribute__((vector_size(4 * WIDTH)));
typedef float loose_wide __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t wide_ints __attribute__((vector_size(4 * WIDTH)));

INLINE wide load_wide(const float *p) { return *(const loose_wide *)p; }
INLINE void store_wide(float *p, wide v) { *(loose_wide *)p = v; }
INLINE wide all_wide(float x) {
#if WIDTH > LANES
    return (wide){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#else
    return all(x);
#endif
}
INLINE wide fused_wide(wide a, wide b, wide c) {
#if WIDTH > LANES && !HAS_ZMM
    union {
        wide whole;
        vec half[2];
    } x = {a}, y = {b}, z = {c};
    z.half[0] = fused(x.half[0], y.half[0], z.half[0]);
    z.half[1] = fused(x.half[1], y.half[1], z.half[1]);
    return z.whole;
#elif WIDTH > LANES
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
#else
    return fused(a, b, c);
#endif
}

/* Holds a vector in a register, where GCC would read it from memory again for every use. */
#if WIDTH > LANES && !HAS_ZMM
#define HOLD(v) (void)0
#elif defined(__AVX512VL__)
#define HOLD(v) __asm__("" : "+v"(v))
#elif defined(__AVX2__)
#define HOLD(v) __asm__("" : "+x"(v))
#else
#define HOLD(v) (void)0
#endif

INLINE vec pick(ints mask, vec yes, vec no) {
    return (vec)((mask & (ints)yes) | (~mask & (ints)no));
}

INLINE int has_any(ints mask) {
    typedef int64_t longs __attribute__((vector_size(32)));
    const longs m = (longs)mask;
    return ((m[0] | m[1]) | (m[2] | m[3])) != 0;
}

/* The larger and the smaller ones; b where one of them is no number. */
INLINE vec larger(vec a, vec b) {
#if defined(__AVX__)
    return __builtin_ia32_maxps256(a, b);
#else
    return pick(a > b, a, b);
#endif
}
INLINE vec smaller(vec a, vec b) {
#if defined(__AVX__)
    return __builtin_ia32_minps256(a, b);
#else
    return pick(a < b, a, b);
#endif
}

/* The lanes' sum, in one order. */
INLINE float total(vec v) {
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    return v[0] + v[1];
}

INLINE float highest(vec v) {
    v = larger(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = larger(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    return v[1] > v[0] ? v[1] : v[0];
}

/* The nearest whole numbers of small ones. */
INLINE vec nearest(vec x) {
    const vec magic = all(12582912.0f);
    return (x + magic) - magic;
}

/* e^x to 2 units in the last place; 0 under -87 (as for -inf), so that what is masked adds
   nothing. */
INLINE vec exponential(vec x) {
    const vec y = smaller(all(88.0f), larger(all(-87.0f), x));
    const vec n = nearest(y * 1.44269504f);
    vec r = fused(n, all(-0.693359375f), y);
    r = fused(n, all(2.12194440e-4f), r);
    vec p = all(1.9875691500e-4f);
    p = fused(p, r, all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    p = fused(p * r, r, r) + 1.0f;
    const ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return pick(x < all(-87.0f), all(0.0f), p * (vec)power);
}

/* ln(x) of normal numbers to 2 units in the last place. */
INLINE vec logarithm(vec x) {
    ints bits = (ints)x, power = ((bits >> 23) & 255) - 126;
    vec m = (vec)((bits & 0x007fffff) | 0x3f000000); /* in [0.5, 1) */
    ints is_small = m < all(0.707106781f);
    m = pick(is_small, m + m, m) - 1.0f;
    vec e = __builtin_convertvector(power + is_small, vec), square = m * m;
    vec p = all(7.0376836292e-2f);
    p = fused(p, m, all(-1.1514610310e-1f));
    p = fused(p, m, all(1.1676998740e-1f));
    p = fused(p, m, all(-1.2420140846e-1f));
    p = fused(p, m, all(1.4249322787e-1f));
    p = fused(p, m, all(-1.6668057665e-1f));
    p = fused(p, m, all(2.0000714765e-1f));
    p = fused(p, m, all(-2.4999993993e-1f));
    p = fused(p, m, all(3.3333331174e-1f));
    p = p * m * square;
    p = fused(e, all(-2.12194440e-4f), p) - 0.5f * square;
    return fused(e, all(0.693359375f), m + p);
}
