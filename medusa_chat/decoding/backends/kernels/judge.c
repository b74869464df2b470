#include "judge.h"

#include <math.h>
#include <stddef.h>

#include "compiler.h"
#include "logits.h"
#include "noise.h"
#include "team.h"

/* Which path is accepted; its last node's row says what comes next. */
static void choose(Verdict *v) {
    int64_t lengths[1024], best = 0;
    float values[1024];
    for (int64_t i = 0; i < v->rows; i++) {
        const int64_t p = v->parents[i];
        int is_taken = i == 0;
        values[i] = 0.0f;
        if (v->is_typical) {
            v->thresholds[i] = fminf(v->epsilon, v->alpha * expf(-v->entropies[i]));
            if (i) values[i] = values[p] + v->at_parent[i];
            if (i) is_taken = expf(v->at_parent[i]) > v->thresholds[p];
        } else if (i) is_taken = v->tokens[i] == v->own[p];
        lengths[i] = is_taken && (i == 0 || lengths[p]) ? v->depths[i] + 1 : 0;
        if (lengths[i] > lengths[best] || (lengths[i] == lengths[best] && values[i] > values[best]))
            best = i;
    }
    v->length = lengths[best];
    const float *x = v->logits + best * v->size, t = v->temperature > 0 ? v->temperature : 1.0f;
    v->is_finite = is_sound(x, (int)v->size);
    v->certainty = v->least > 0 ? certainty(x, (int)v->size, t, v->own[best]) : 0.0f;
    if (v->certainty < v->least) v->certainty = 0.0f;
    for (int64_t at = v->length; at--; best = v->parents[best]) v->path[at] = best;
}

void judge_part(const void *what, int part, int parts) {
    const Verdict *v = what;
    const int size = (int)v->size;
    const int draws = v->temperature > 0 && v->own && !v->is_typical;
    const float temperature = v->temperature > 0 ? v->temperature : 1.0f;
    if (draws) {
        for (int d = part; d <= v->deepest; d += parts)
            noise_at(v->seed, (uint32_t)(v->place + 1 + d), v->noise + (ptrdiff_t)d * size, size);
        meet(part, parts);
    }
    for (int i = part; i < v->rows; i += parts) {
        const float *x = v->logits + (ptrdiff_t)i * size;
        const float *noise = draws ? v->noise + (ptrdiff_t)v->depths[i] * size : NULL;
        if (v->own) v->own[i] = argmax(x, noise, size, temperature);
        if (v->entropies) v->sums[i] = log_sum(x, size, temperature, v->entropies + i);
    }
    if (v->entropies) {
        meet(part, parts);
        for (int i = part; i < v->rows; i += parts) {
            const int64_t p = v->parents[i];
            v->at_parent[i] = v->logits[p * v->size + v->tokens[i]] / temperature - v->sums[p];
        }
    }
    if (!v->path) return;
    meet(part, parts);
    if (part == 0) choose((Verdict *)v);
}

EXPORT void judge(Verdict *v) { together(judge_part, v, (int)v->threads); }
