/* Attention of a pass's rows to the text and to each other. */

#pragma once

#include "pass.h"

#define BLOCK 16 /* (row, head) pairs that go together */

/* How many of the mask's first columns hide nothing from any row. */
int free_columns(const Pass *pass);

/* Attention of BLOCK pairs that share the key head `kv`, from pair `first` of its rows * groups on:
   qkv [rows, qkv_width] with the keys already in the layer's -> mixed [rows, heads * head_dim].
   Works in scratch [2 * head_dim + keys + BLOCK, BLOCK]. */
void attend(const Pass *pass, const Layer *layer, const float *qkv, int kv, int first, int free,
            float *scratch, float *mixed);
