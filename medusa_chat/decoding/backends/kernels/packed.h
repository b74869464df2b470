/* Products with weights as a GGUF file has them: whole numbers, and a scale, and perhaps a floor,
   for each block of inputs.

   Of GROUP outputs and two inputs the numbers stand in the order of HALVES: output i / 2, input
   i % 2, for i from 0 to 31. Those of 4 bits lie in words of four, which are of four pairs
   of inputs, so that a word shifted by 4 bits is the index of the next one. */

#pragma once

#include "half.h"
#include "product.h"

#define GROUP 16 /* outputs whose numbers stand together */
#define BOTH 32  /* of them and two inputs */
#define IN_A_WORD 4
#define AHEAD 4096 /* bytes */

/* LANES scales or floors of a panel's table, from output j on. */
INLINE vec floats_at(const Weights *w, const char *table, int j) {
    if (w->is_wide) return load((const float *)table + j);
    const halves bits = *(const halves *)((const uint16_t *)table + j);
#if defined(__F16C__)
    vec found;
    __asm__("vcvtph2ps %1, %0" : "=x"(found) : "x"(bits));
    return found;
#else
    const words whole = __builtin_convertvector(bits, words);
    const vec size = (vec)((whole & 0x7fff) << 13) * 0x1p112f; /* of fp16, finite */
    return (vec)((words)size | (whole & 0x8000) << 16);
#endif
}

/* Bytes of a table. */
INLINE ptrdiff_t table_bytes(const Weights *w) { return PANEL * (w->is_wide ? 4 : 2); }

/* Bytes behind the rows of x where a thread keeps what belongs to their blocks, and outputs. */
size_t packed_room(const Product *p);

/* There: the sums of x over each block [rows, blocks], and a panel's outputs [rows, PANEL]. */
float *totals_at(const Product *p);
float *outputs_at(const Product *p);

/* The rows x [rows, ins] to where the product p reads its own, rounded. */
void round_packed(const Product *p, const float *x);

/* The panels from `at` to `end` of every row; by tiles, where the product is tiled. */
void multiply_packed(const Product *p, int at, int end);
void multiply_packed_tiles(const Product *p, int at, int end);

/* A panel's outputs, which stand at outputs_at, to where they go. */
void put_panel(const Product *p, int at);
