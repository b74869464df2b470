/* Lanes are outputs and sums go along the inputs, so that no sum depends on the rows beside it. */

#include "product.h"

#include <stddef.h>
#include <stdint.h>

#include "team.h"
#include "vectors.h"

#define NOINLINE __attribute__((noinline))

/* Eight sums to where they go; the last ones may be fewer. */
INLINE void put(const Product *p, int row, int out, vec sums) {
    float *y = p->y + (ptrdiff_t)row * p->outs + out;
    if (out + LANES <= p->outs) {
        if (p->bias) sums += load(p->bias + out);
        store(y, p->adds ? load(y) + sums : sums);
        return;
    }
    for (int j = 0; out + j < p->outs; j++) {
        float sum = sums[j];
        if (p->bias) sum += p->bias[out + j];
        y[j] = p->adds ? y[j] + sum : sum;
    }
}

/* ROWS rows times PANELS panels, from panel `at` on. Several rows take long enough for the panels
   behind these to come near meanwhile; one row is all waiting for memory, and asks for no more. */
#define TILE(ROWS, PANELS)                                                                      \
    INLINE void tile_##ROWS##_##PANELS(const Product *p, int row, int at) {                     \
        const int ins = p->ins;                                                                 \
        const ptrdiff_t panel = (ptrdiff_t)ins * LANES;                                         \
        const float *x = p->x + (ptrdiff_t)row * ins, *w = p->w + at * panel;                   \
        vec sums[ROWS * PANELS] = {0};                                                          \
        for (int k = 0; k < ins; k++) {                                                         \
            vec ours[PANELS];                                                                   \
            _Pragma("GCC unroll 8") for (int j = 0; ROWS > 1 && !(k & 1) && j < PANELS; j++)    \
                __builtin_prefetch(w + (PANELS + j) * panel + (ptrdiff_t)k * LANES, 0, 3);      \
            _Pragma("GCC unroll 8") for (int j = 0; j < PANELS; j++)                            \
                ours[j] = load(w + j * panel + (ptrdiff_t)k * LANES);                           \
            _Pragma("GCC unroll 8") for (int j = 0; ROWS > 1 && j < PANELS; j++) HOLD(ours[j]); \
            _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++) {                            \
                vec theirs = all(x[(ptrdiff_t)i * ins + k]);                                    \
                _Pragma("GCC unroll 8") for (int j = 0; j < PANELS; j++)                        \
                    sums[i * PANELS + j] = fused(theirs, ours[j], sums[i * PANELS + j]);        \
            }                                                                                   \
        }                                                                                       \
        _Pragma("GCC unroll 8") for (int i = 0; i < ROWS; i++)                                  \
            _Pragma("GCC unroll 8") for (int j = 0; j < PANELS; j++)                            \
                put(p, row + i, (at + j) * LANES, sums[i * PANELS + j]);                        \
    }

/* The panels from `at` to `end` of ROWS rows. */
#define SWEEP(ROWS, PANELS)                                                          \
    TILE(ROWS, PANELS)                                                               \
    TILE(ROWS, 1)                                                                    \
    static NOINLINE void sweep_##ROWS(const Product *p, int row, int at, int end) {  \
        for (; at + PANELS <= end; at += PANELS) tile_##ROWS##_##PANELS(p, row, at); \
        for (; at < end; at++) tile_##ROWS##_1(p, row, at);                          \
    }

SWEEP(1, 8)
SWEEP(2, 6)
SWEEP(3, 4)
SWEEP(4, 3)
SWEEP(5, 2)
SWEEP(6, 2)

/* The panels from `at` to `end`, three at a time for all rows but the last few, which find them in
   a near cache. One or two rows over a multiple of four go with the four before them. */
void multiply(const Product *p, int at, int end) {
    const int over = p->rows % 4, last = over < 3 && over && p->rows > 4 ? over + 4 : over;
    const int whole = p->rows - last;
    while (at < end) {
        const int begin = at, stop = least(at + 24, end);
        for (; at < stop; at = least(at + 3, stop))
            for (int row = 0; row < whole; row += 4) sweep_4(p, row, at, least(at + 3, stop));
        if (last == 1) sweep_1(p, whole, begin, stop);
        if (last == 2) sweep_2(p, whole, begin, stop);
        if (last == 3) sweep_3(p, whole, begin, stop);
        if (last == 5) sweep_5(p, whole, begin, stop);
        if (last == 6) sweep_6(p, whole, begin, stop);
    }
}

void share(const Product *p, int base, int panels, int part, int parts) {
    multiply(p, base + first(panels, part, parts), base + first(panels, part + 1, parts));
}

/* w [outs, ins], row by row, to panels [ceil(outs / 8), ins, 8]. */
EXPORT void pack(const float *w, float *panels, int64_t outs, int64_t ins) {
    for (int64_t at = 0; at < outs; at += LANES)
        for (int64_t k = 0; k < ins; k++)
            for (int64_t j = 0; j < LANES; j++)
                *panels++ = at + j < outs ? w[(at + j) * ins + k] : 0.0f;
}

static void multiply_part(const void *what, int part, int parts) {
    const Product *p = what;
    share(p, 0, (p->outs + LANES - 1) / LANES, part, parts);
}

/* One linear alone: x [rows, ins] -> y [rows, outs]. */
EXPORT void linear(const float *x, const float *w, const float *bias, float *y, int64_t rows,
                   int64_t ins, int64_t outs, int64_t threads) {
    const Product p = {x, w, bias, y, (int)rows, (int)ins, (int)outs, 0};
    together(multiply_part, &p, (int)threads);
}
