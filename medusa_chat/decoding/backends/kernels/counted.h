/* Products with packed weights: of whole numbers, x of 8 bits with one scale for each 32 inputs. */

#pragma once

#include "product.h"

/* Bytes where a thread keeps the rows of x, rounded, and outputs. */
size_t counted_room(const Product *p);

/* The rows x [rows, ins] to where the product p reads its own, rounded. */
void round_counted(const Product *p, const float *x);

/* The panels from `at` to `end` of every row. */
void multiply_counted(const Product *p, int at, int end);
