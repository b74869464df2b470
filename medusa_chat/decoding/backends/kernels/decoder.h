/* A few rows through a decoder on a CPU: products, norms, rotary attention, gated SiLU. In fp32, or
   with weights of bf16, where what is multiplied with them is rounded to bf16 and all else is fp32.

   Every number is summed in one order, whatever rows stand beside it: products along their inputs
   in eight lanes, attention along the text. A row of a tree therefore has the bits that it has
   alone, and a tree decodes to plain decoding's tokens, bit for bit. Weights are read where torch
   holds them. Plain C with vectors of GCC and Clang; no library but libm. */

#pragma once

#include "pass.h"

/* One part of a pass, for a team: hidden is whole once all have met, and normed by part 0. */
void decode(const void *what, int part, int parts);

/* Whether every row lies within the embeddings and the cache. */
int is_within(const Pass *pass);
