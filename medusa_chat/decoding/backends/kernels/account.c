#include "account.h"

#include "compiler.h"

static double lesser(double a, double b) { return a < b ? a : b; }

static int limit(const Account *a, Growth *g, int64_t most, double rate, double gate) {
    g->seconds = a->prices;
    g->most = most < a->count ? most : a->count;
    g->rate = rate, g->gate = gate;
    return 1;
}

EXPORT int allow(Account *a, Growth *g, int64_t length, double certainty) {
    a->credit = lesser(a->most, a->credit + a->share * (double)(length - a->length) * a->plain);
    a->length = length;
    a->certain = certainty >= a->least ? a->certain + 1 : 0;
    if (a->asks) return limit(a, g, a->usual, 0.0, 0.0);
    const int is_sure = a->certain >= a->proof, is_rich = a->balance >= a->enough;
    int64_t most = 0;
    if (!is_sure && !is_rich) return 0;
    while (most < a->count && a->prices[most] <= a->plain + a->credit) most++;
    if (most < 2) return 0;
    const double seen = a->pace / a->plain;
    most = most < a->usual || !is_rich ? most : a->usual;
    if (is_rich) return limit(a, g, most, a->rate > seen ? a->rate : seen, 0.0);
    return limit(a, g, most, a->strict * a->rate, a->sure);
}

EXPORT void book(Account *a, int64_t nodes, int64_t tokens) {
    const double price = a->prices[(nodes < a->count ? nodes : a->count) - 1];
    const double cost = price > a->plain ? price : a->plain, earned = (double)tokens * a->plain;
    const double saved = earned - cost;
    if (a->balance >= a->enough) a->pace += a->weight * (earned / cost - a->pace);
    a->balance += saved;
    a->credit = lesser(a->most, a->credit + saved);
}
