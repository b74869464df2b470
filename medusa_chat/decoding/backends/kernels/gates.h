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

/* Gates times ups. */
INLINE vec gated(vec gate, vec up, const Layer *layer) {
    if (layer->gates != CLAMPED) return gate_of(gate, layer->gates) * up;
    const vec most = all(layer->limit);
    gate = smaller(most, gate); /* what is no number stays */
    up = larger(-most, smaller(most, up));
    return gate / (1.0f + exponential(-layer->alpha * gate)) * (up + 1.0f);
}

/* Columns `at` to `end` of gate and up [rows, inner]: the gate's become what goes to down. */
INLINE void activate(float *gate, const float *up, const Layer *layer, int rows, int at, int end) {
    const int inner = (int)layer->inner;
    end = least(end, inner);
    for (int i = 0; i < rows; i++, gate += inner, up += inner) {
        int k = at;
        for (; k + LANES <= end; k += LANES)
            store(gate + k, gated(load(gate + k), load(up + k), layer));
        for (; k < end; k++) gate[k] = gated(all(gate[k]), all(up[k]), layer)[0];
    }
}
