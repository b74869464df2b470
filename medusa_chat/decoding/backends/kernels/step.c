#include "step.h"

#include <stddef.h>
#include <string.h>

#include "clock.h"
#include "compiler.h"
#include "product.h"
#include "team.h"
#include "vectors.h"


/* The rows of `path` [count] behind the text, in its order. A path only ever moves up. */
static void keep(const Pass *pass, const int64_t *path, int64_t count) {
    const Decoder *m = pass->decoder;
    const size_t size = (size_t)m->head_dim * sizeof(float);
    for (int64_t j = 1; j < count; j++) {
        if (path[j] == j) continue;
        for (int64_t i = 0; i < m->count * m->kv_heads; i++) {
            const Layer *layer = m->layers + i / m->kv_heads;
            const ptrdiff_t at = i % m->kv_heads * m->capacity + pass->start;
            const ptrdiff_t from = (at + path[j]) * m->head_dim, to = (at + j) * m->head_dim;
            memcpy(layer->keys + to, layer->keys + from, size);
            memcpy(layer->values + to, layer->values + from, size);
        }
    }
}

/* The rows of the draft that was made. */
static void settle(const Step *s) {
    const Growth *g = s->draft->growth;
    if (!g) return;
    s->pass->rows = s->verdict->rows = g->count;
    s->verdict->deepest = g->deepest;
    for (int64_t i = 0; i < g->count; i++) s->positions[i] = s->pass->start + g->own_depths[i];
}

static void step_part(const void *what, int part, int parts) {
    Step *s = (Step *)what;
    const Pass *pass = s->pass;
    const Verdict *v = s->verdict;
    const int size = (int)pass->decoder->hidden, outs = (int)v->size;
    const double begun = now();
    if (s->draft) propose_part(s->draft, part, parts);
    if (s->draft && part == 0) settle(s);
    meet(part, parts);
    const double drafted = now();
    const int rows = (int)pass->rows;
    const int half = (int)pass->decoder->is_half;
    const int wanted = s->is_text ? 1 : rows;
    const float *hidden = pass->hidden + (ptrdiff_t)(rows - wanted) * size;
    const Product lm = {hidden, s->lm_panels, s->lm_bias, s->logits, wanted, size, outs, 0, half};
    decode(pass, part, parts);
    meet(part, parts);
    share(&lm, part, parts);
    meet(part, parts);
    const double passed = now();
    judge_part(v, part, parts);
    if (part) return;
    s->drafting = drafted - begun, s->passing = passed - drafted;
    keep(pass, v->path, v->length);
    memcpy(s->last, hidden + v->path[v->length - 1] * size, sizeof(float) * (size_t)size);
}

EXPORT int64_t step(Step *s) {
    Pass *pass = s->pass;
    const double begun = now();
    for (int64_t i = 0; i < pass->rows; i++) { /* with a growth as many as it can have */
        s->positions[i] = pass->start + (s->is_text ? i : s->verdict->depths[i]);
        if (s->draft) s->tokens[i] = i ? 0 : s->draft->root;
    }
    if (!is_within(pass)) return 1;
    together(step_part, s, (int)pass->threads);
    s->whole = now() - begun;
    return 0;
}
