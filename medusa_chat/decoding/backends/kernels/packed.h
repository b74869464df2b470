/* Products with weights as a GGUF file has them: whole numbers, and a scale, and perhaps a floor,
   for each block of inputs. */

#pragma once

#include "product.h"

/* Of a packed panel one block's numbers to HALVES [block / 2, PANEL, 2]; exact. */
void unpack_numbers(const Weights *w, const void *codes, uint16_t *to);

/* Scales or floors [PANEL] to floats. */
void unpack_scales(const Weights *w, const void *stored, float *to);

/* Bytes behind the rows of x where a thread keeps sums over blocks, and of outputs. */
size_t packed_room(const Product *p);

/* The sums of x over each block of inputs, for a product that is ready. */
void add_up_blocks(const Product *p);

/* The panels from `at` to `end` of every row. */
void multiply_packed(const Product *p, int at, int end);
