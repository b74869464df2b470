/* The gates of gated products. */

#pragma once

#include "pass.h"
#include "vectors.h"

/* The gate of LANES numbers: SILU, or GELU by tanh, which is as much: x / (1 + e^-z). */
INLINE vec gate_of(vec x, int64_t kind) {
    vec z = x;
    if (kind == GELU) z = x * fused(x * x, all(0.0713548162726f), all(1.59576912160573f));
    return x / (1.0f + exponential(-z));
}

/* Columns `at` to `end` of gate and up [rows, inner]: the gate's become gate(gate) * up. */
INLINE void activate(float *gate, const float *up, const Layer *layer, int rows, int at, int end) {
    const int inner = (int)layer->inner;
    end = least(end, inner);
    for (int i = 0; i < rows; i++, gate += inner, up += inner) {
        int k = at;
        for (; k + LANES <= end; k += LANES)
            store(gate + k, gate_of(load(gate + k), layer->gates) * load(up + k));
        for (; k < end; k++) gate[k] = gate_of(all(gate[k]), layer->gates)[0] * up[k];
    }
}
