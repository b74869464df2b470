/* Products with weights as a GGUF file has them: whole numbers, and a scale, and perhaps a floor,
   for each block of inputs.

   Those of two inputs and all of a panel's outputs stand together, in the order of HALVES. Numbers
   of 4 bits lie in words of four, which are of four pairs of inputs, so that a word shifted by 4
   bits is the index of the next one. */

#pragma once

#include "half.h"
#include "product.h"

#define BOTH (2 * PANEL) /* numbers of two inputs */
#define IN_A_WORD 4
#if WIDTH > LANES
#define AHEAD 8192 /* bytes; this was measured with AVX-512, 4096 with AVX2 */
#else
#define AHEAD 4096
#endif

/* WIDTH scales or floors of a panel's table, from output j on. */
INLINE wide floats_at(const Weights *w, const char *table, int j) {
    typedef uint16_t some __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));
    if (w->is_wide) return load_wide((const float *)table + j);
    const some *bits = (const some *)((const uint16_t *)table + j);
#if defined(__F16C__)
    wide found;
    __asm__("vcvtph2ps %1, %0" : "=v"(found) : "m"(*bits));
    return found;
#else
    const words whole = __builtin_convertvector(*bits, words);
    const wide size = (wide)((whole & 0x7fff) << 13) * 0x1p112f; /* of fp16, finite */
    return (wide)((words)size | (whole & 0x8000) << 16);
#endif
}

/* Bytes of a table. */
INLINE ptrdiff_t table_bytes(const Weights *w) { return PANEL * (w->is_wide ? 4 : 2); }

/* Bytes of a block's numbers. */
INLINE ptrdiff_t numbers_size(const Weights *w) {
    return w->block * PANEL / (w->kind == NIBBLES ? 2 : 1);
}

/* Asks for what is read a while after the `bytes` at p. */
INLINE void fetch(const char *p, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + AHEAD + i);
}

/* Bytes behind the rows of x where a thread keeps what belongs to their blocks, and outputs. */
size_t packed_room(const Product *p);

/* The rows x [rows, ins] to where the product p reads its own, rounded. */
void round_packed(const Product *p, const float *x);

/* The panels from `at` to `end` of every row. */
void multiply_packed(const Product *p, int at, int end);
