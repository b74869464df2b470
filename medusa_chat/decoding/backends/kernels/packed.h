/* Products with weights as a GGUF file has them: whole numbers, and a scale, and perhaps a floor,
   for each block of inputs. */

#pragma once

#include "product.h"

/* Of a packed panel one block's numbers [block / 2, PANEL, 2], exact: to bf16, where there are tiles,
   or to whole numbers of 16 bits. */
void unpack_to_bf16(const Weights *w, const void *codes, uint16_t *to);
void unpack_to_ints(const Weights *w, const void *codes, uint16_t *to);

/* Scales or floors [PANEL] to floats. */
void unpack_scales(const Weights *w, const void *stored, float *to);

/* Bytes behind the rows of x where a thread keeps what belongs to their blocks, and outputs. */
size_t packed_room(const Product *p);

/* The rows x [rows, ins] to where the product p reads its own, rounded. */
void round_packed(const Product *p, const float *x);

/* The panels from `at` to `end` of every row. */
void multiply_packed(const Product *p, int at, int end);
