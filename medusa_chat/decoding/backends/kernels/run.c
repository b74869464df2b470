#include "account.h"
#include "clock.h"
#include "compiler.h"
#include "step.h"

/* Step after step, each from where the one before it ended, until something stands in the text that
   the host has to see, or as far as it allows. */
typedef struct {
    Step *step;          /* its place, its root and the tree of all steps are set */
    Account *account;    /* what each may draft; NULL: all, where there is a draft */
    const int64_t *ends; /* [end_count]: tokens behind which nothing follows */
    int64_t *ids;        /* [most_steps, stride], out: see `note` */
    double *times;       /* [most_steps, 3], out: seconds of the draft, of the pass, of all */
    int64_t end_count, rows, stride, longest; /* rows: of a step; longest: nodes of a path */
    int64_t most_steps, most_tokens, last_start; /* no step begins behind more tokens than that */
    int64_t count;                               /* out: of steps */
    double seconds; /* after which none begins */
    double certainty; /* the backbone's, of the root; 0: not known to be enough */
    double least;     /* from which on that of the next one is wanted; 0: never */
    double whole;     /* out: seconds of all */
} Run;

/* Nodes, length of the path, the next token, heads that were asked; the path; its tokens. */
static void note(const Run *r, int is_drafted) {
    const Step *s = r->step;
    const Verdict *v = s->verdict;
    const Growth *g = s->draft ? s->draft->growth : NULL;
    int64_t *ids = r->ids + r->count * r->stride;
    double *times = r->times + r->count * 3;
    ids[0] = v->rows, ids[1] = v->length, ids[2] = v->own[v->path[v->length - 1]];
    ids[3] = !is_drafted ? 0 : g ? g->asked : s->draft->used;
    for (int64_t i = 0; i < v->length; i++)
        ids[4 + i] = v->path[i], ids[4 + r->longest + i] = s->tokens[v->path[i]];
    times[0] = s->drafting, times[1] = s->passing, times[2] = s->whole;
}

static int is_end(const Run *r, int64_t token) {
    for (int64_t i = 0; i < r->end_count; i++)
        if (r->ends[i] == token) return 1;
    return 0;
}

static int has_end(const Run *r) {
    const int64_t *ids = r->ids + r->count * r->stride, *tokens = ids + 4 + r->longest;
    for (int64_t i = 1; i < ids[1]; i++)
        if (is_end(r, tokens[i])) return 1;
    return is_end(r, ids[2]);
}

/* Behind `start` tokens, from this root on. */
static void stand(Step *s, int64_t start, int64_t root) {
    s->pass->start = s->pass->free = s->verdict->place = start;
    s->tokens[0] = root;
    if (s->draft) s->draft->root = root;
}

/* Of a step as many as it can have, until its draft is there. */
static int64_t most_rows(const Run *r, const Proposal *draft, int is_drafted) {
    if (draft && !is_drafted) return 1;
    const Growth *g = draft ? draft->growth : NULL;
    return g && g->most < r->rows ? g->most : r->rows;
}

/* 0, or 1 where a row of the first one lies outside: nothing is done then. */
EXPORT int64_t steps(Run *r) {
    Step *s = r->step;
    Verdict *v = s->verdict;
    Proposal *draft = s->draft;
    const double begun = now();
    double certainty = r->certainty;
    int64_t given = 0, failed = 0;
    for (r->count = 0;;) {
        Growth *g = draft ? draft->growth : NULL;
        const int64_t start = s->pass->start;
        const int is_drafted = draft && (!g || allow(r->account, g, start, certainty));
        s->draft = is_drafted ? draft : NULL;
        /* who is rich decides without it */
        v->least = g && r->account->balance >= r->account->enough ? 0.0f : (float)r->least;
        s->pass->rows = v->rows = most_rows(r, draft, is_drafted);
        if (draft && !is_drafted) v->deepest = 0;
        failed = step(s);
        if (failed) break;
        note(r, is_drafted);
        if (is_drafted && g) book(r->account, v->rows, v->length);
        const int64_t next = r->ids[r->count * r->stride + 2];
        const int is_over = !v->is_finite || has_end(r);
        certainty = v->certainty, given += v->length, r->count++;
        s->draft = draft;
        if (is_over || r->count == r->most_steps || given >= r->most_tokens) break;
        if (start + v->length > r->last_start || now() - begun >= r->seconds) break;
        stand(s, start + v->length, next);
    }
    s->draft = draft;
    r->whole = now() - begun;
    return failed && !r->count;
}
