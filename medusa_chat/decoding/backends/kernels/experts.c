/* Pairs of rows and experts are sorted by expert, so that an expert's weights are read once for all
   rows that pass through it, and those that no row chose are not read. Which experts a row chooses
   follows from its scores alone, which are summed in one order whatever rows stand beside it. */

#include "experts.h"

#include <math.h>
#include <string.h>

#include "gates.h"
#include "product.h"
#include "team.h"
#include "vectors.h"

#define MOST_EXPERTS 512

/* The pairs, by expert: those of expert e are from starts[e] to starts[e + 1]. */
typedef struct {
    float *shares; /* [rows, chosen] */
    int32_t *experts, *places; /* [rows, chosen]: a row's experts, and where its pairs stand */
    int32_t *rows;             /* [pairs], by place */
    int32_t *starts;           /* [count + 1] */
} Pairs;

int64_t mixture_size(const Layer *layer, int64_t rows, int64_t hidden) {
    return rows * (layer->experts.count + layer->experts.chosen * hidden);
}

int64_t mixture_own_size(const Layer *layer, int64_t rows, int64_t hidden) {
    return rows * (hidden + 4 * layer->experts.chosen) + layer->experts.count + 1;
}

static Pairs pairs_at(const Mixture *m) {
    const ptrdiff_t pairs = m->rows * m->layer->experts.chosen;
    int32_t *numbers = (int32_t *)(m->lists + pairs);
    return (Pairs){m->lists, numbers, numbers + pairs, numbers + 2 * pairs, numbers + 3 * pairs};
}

/* The experts with the highest scores, the first of equals first. */
static void choose(const float *scores, int count, int chosen, int32_t *to) {
    uint8_t taken[MOST_EXPERTS] = {0};
    for (int c = 0; c < chosen; c++) {
        int best = -1;
        for (int e = 0; e < count; e++)
            if (!taken[e] && (best < 0 || scores[e] > scores[best])) best = e;
        taken[best] = 1;
        to[c] = best;
    }
}

static void weigh(const float *scores, const Experts *of, const int32_t *experts, float *shares) {
    const float high = scores[experts[0]];
    float sum = 0.0f;
    for (int c = 0; c < of->chosen; c++) {
        shares[c] = expf(scores[experts[c]] - high);
        if (of->is_normed) sum += shares[c];
    }
    for (int e = 0; e < of->count && !of->is_normed; e++) sum += expf(scores[e] - high);
    for (int c = 0; c < of->chosen; c++) shares[c] /= sum;
}

/* All rows' pairs, by every part for itself. */
static Pairs route(const Mixture *m) {
    const Experts *of = &m->layer->experts;
    const int count = (int)of->count, chosen = (int)of->chosen, pairs = m->rows * chosen;
    const Pairs p = pairs_at(m);
    memset(p.starts, 0, sizeof(int32_t) * (size_t)(count + 1));
    for (int i = 0; i < m->rows; i++) {
        const float *scores = m->scores + (ptrdiff_t)i * count;
        choose(scores, count, chosen, p.experts + i * chosen);
        weigh(scores, of, p.experts + i * chosen, p.shares + i * chosen);
    }
    for (int i = 0; i < pairs; i++) p.starts[p.experts[i] + 1]++;
    for (int e = 0; e < count; e++) p.starts[e + 1] += p.starts[e];
    for (int i = pairs - 1; i >= 0; i--) { /* starts[e + 1] falls to where expert e begins */
        const int place = --p.starts[p.experts[i] + 1];
        p.places[i] = place, p.rows[place] = i / chosen;
    }
    memmove(p.starts, p.starts + 1, sizeof(int32_t) * (size_t)count);
    p.starts[count] = pairs;
    return p;
}

/* The product of rows x by one expert's linear. */
static Product product_by(const Linear *all_of, int expert, const float *x, float *y, int rows,
                          int ins, int outs) {
    const ptrdiff_t panels = (outs + PANEL - 1) / PANEL, size = panel_size(&all_of->weights, ins);
    Product p = {.x = x,
                 .weights = all_of->weights,
                 .bias = all_of->bias ? all_of->bias + (ptrdiff_t)expert * outs : NULL,
                 .y = y,
                 .rows = rows,
                 .ins = ins,
                 .outs = outs};
    p.weights.panels = (const char *)p.weights.panels + expert * panels * size;
    return p;
}

/* An expert's gated products, of the panels from `at` to `end`. */
static void gate_expert(const Mixture *m, const Pairs *p, int expert, int at, int end) {
    const Layer *layer = m->layer;
    const int begun = p->starts[expert], rows = p->starts[expert + 1] - begun;
    const int inner = (int)layer->inner;
    float *gate = m->gate + (ptrdiff_t)begun * inner, *up = m->up + (ptrdiff_t)begun * inner;
    for (int i = 0; i < rows; i++)
        memcpy(m->gathered + (ptrdiff_t)i * m->size,
               m->x + (ptrdiff_t)p->rows[begun + i] * m->size, sizeof(float) * (size_t)m->size);
    const Product both[] = {
        product_by(&layer->gate, expert, m->gathered, gate, rows, m->size, inner),
        product_by(&layer->up, expert, m->gathered, up, rows, m->size, inner),
    };
    multiply_alike(both, 2, at, end);
    activate(gate, up, layer, rows, PANEL * at, PANEL * end);
}

static void reduce_expert(const Mixture *m, const Pairs *p, int expert, int at, int end) {
    const int begun = p->starts[expert], inner = (int)m->layer->inner;
    const Product down =
        product_by(&m->layer->down, expert, m->gate + (ptrdiff_t)begun * inner,
                   m->outs + (ptrdiff_t)begun * m->size, p->starts[expert + 1] - begun, inner, m->size);
    multiply_alike(&down, 1, at, end);
}

/* One part's panels of all experts that a row passes through, `panels` each. */
static void each_expert(const Mixture *m, const Pairs *p, int panels, int part, int parts,
                        void (*go)(const Mixture *, const Pairs *, int, int, int)) {
    const int count = (int)m->layer->experts.count;
    int used = 0;
    for (int e = 0; e < count; e++) used += p->starts[e + 1] > p->starts[e];
    const int begun = first(used * panels, part, parts), stop = first(used * panels, part + 1, parts);
    for (int e = 0, base = 0; e < count && base < stop; e++) {
        if (p->starts[e + 1] == p->starts[e]) continue;
        const int at = begun > base ? begun - base : 0, end = least(stop - base, panels);
        if (at < end) go(m, p, e, at, end);
        base += panels;
    }
}

/* What its experts give a row, by their shares: one part's columns. */
static void sum_up(const Mixture *m, const Pairs *p, int part, int parts) {
    const int chosen = (int)m->layer->experts.chosen, lanes = m->size / LANES;
    const int at = first(lanes, part, parts) * LANES, end = first(lanes, part + 1, parts) * LANES;
    for (int i = 0; i < m->rows; i++) {
        float *y = m->y + (ptrdiff_t)i * m->size;
        for (int c = i * chosen; c < (i + 1) * chosen; c++) {
            const float *out = m->outs + (ptrdiff_t)p->places[c] * m->size;
            const vec share = all(p->shares[c]);
            for (int k = at; k < end; k += LANES)
                store(y + k, c > i * chosen ? fused(load(out + k), share, load(y + k))
                                            : load(out + k) * share);
        }
    }
}

void mix_experts(const Mixture *m, int part, int parts) {
    const Layer *layer = m->layer;
    const Experts *of = &layer->experts;
    const Product router = {.x = m->x,
                            .weights = of->router.weights,
                            .bias = of->router.bias,
                            .y = m->scores,
                            .rows = m->rows,
                            .ins = m->size,
                            .outs = (int)of->count};
    share(&router, part, parts);
    meet(part, parts);
    const Pairs pairs = route(m);
    each_expert(m, &pairs, ((int)layer->inner + PANEL - 1) / PANEL, part, parts, gate_expert);
    meet(part, parts);
    each_expert(m, &pairs, (m->size + PANEL - 1) / PANEL, part, parts, reduce_expert);
    meet(part, parts);
    sum_up(m, &pairs, part, parts);
    meet(part, parts);
}
