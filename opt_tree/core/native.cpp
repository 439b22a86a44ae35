// What growing a tree does between two forwards of a drafter, in one call instead of some thirty operations of numpy;
// what laying one out does before it, and what judging a tree does behind the target's.
//
// Each of those is paid for in cold caches: a forward has just pushed everything out. The arithmetic is that of
// `CandidatePool._add` and `TopK.pick`, operation by operation, so that both give the same bits; numpy is the reference.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace {

template <typename Real>
struct Child {
    Real path;      // log-probability of the path from the root
    int64_t place;  // row of the frontier times columns, plus column
};

template <typename Real>
bool better(const Child<Real>& one, const Child<Real>& other) {  // of equals the first
    return one.path > other.path || (one.path == other.path && one.place < other.place);
}

// The best of all that is offered in the order of places: at most `most`, all above `floor`, which rises with them.
template <typename Real>
struct Best {
    std::vector<Child<Real>> kept;  // a heap, the worst on top
    size_t most;
    Real floor;

    Best(size_t most, Real floor) : most(most), floor(floor) { kept.reserve(most); }

    void offer(Real path, int64_t place) {
        if (!(path > floor)) return;
        if (kept.size() == most) {
            std::pop_heap(kept.begin(), kept.end(), better<Real>);
            kept.pop_back();
        }
        kept.push_back({path, place});
        std::push_heap(kept.begin(), kept.end(), better<Real>);
        if (kept.size() == most) floor = kept.front().path;
    }
};

// A drafter's `Laws` about a frontier: of shape [frontier, columns], its peaks of [frontier, groups].
template <typename Real>
struct Answer {
    const Real *log_probs, *peaks;
    const int64_t* tokens;  // of the columns; null: the columns themselves
    int64_t columns, groups, by_row;  // by_row: 1 where each row has tokens of its own

    int64_t token(int64_t place) const {
        const int64_t column = place % columns;
        return tokens == nullptr ? column : tokens[by_row ? place : column];
    }
};

// The candidates of a step, as `CandidatePool` stores them: rows of `capacity`.
struct Pool {
    int64_t *tokens, *parents, *depths, *draft_rows;
    double* paths;

    Pool(int64_t* storage, int64_t capacity)
        : tokens(storage), parents(storage + capacity), depths(storage + 2 * capacity),
          draft_rows(storage + 3 * capacity), paths(reinterpret_cast<double*>(storage + 4 * capacity)) {}
};

template <typename Real>
std::vector<Child<Real>> pick(const Answer<Real>& answer, const std::vector<Real>& above, Real floor, int64_t most) {
    const int64_t size = answer.columns / answer.groups, frontier = above.size();
    if (floor == -std::numeric_limits<Real>::infinity()) {
        floor = -std::numeric_limits<float>::max() / 2;  // above -inf, which nobody is to pick
        Best<Real> highest(most, floor);  // as many children reach the last of them: what is below it is out
        for (int64_t row = 0; row < frontier; row++)
            for (int64_t group = 0; group < answer.groups; group++)
                highest.offer(answer.peaks[row * answer.groups + group] + above[row], 0);
        if (highest.floor > floor) floor = std::nextafter(highest.floor, -std::numeric_limits<Real>::infinity());
    }
    Best<Real> best(most, floor);
    for (int64_t row = 0; row < frontier; row++)
        for (int64_t group = 0; group < answer.groups; group++) {
            if (!(answer.peaks[row * answer.groups + group] + above[row] > best.floor)) continue;
            const int64_t first = row * answer.columns + group * size;
            for (int64_t place = first; place < first + size; place++)
                best.offer(answer.log_probs[place] + above[row], place);
        }
    std::sort(best.kept.begin(), best.kept.end(), [](auto& one, auto& other) { return one.place < other.place; });
    return best.kept;
}

template <typename Real>
int64_t grow(const Answer<Real>& answer, Pool pool, int64_t size, int64_t first, int64_t frontier, int64_t depth,
             double floor, int64_t most) {
    std::vector<int64_t> rows(frontier);  // of the pool
    std::vector<Real> above(frontier);
    for (int64_t row = 0; row < size; row++)
        if (pool.draft_rows[row] >= first) {
            rows[pool.draft_rows[row] - first] = row;
            above[pool.draft_rows[row] - first] = Real(pool.paths[row]);
        }
    for (const auto& child : pick(answer, above, Real(floor), most)) {
        const int64_t parent = rows[child.place / answer.columns];
        pool.tokens[size] = answer.token(child.place);
        pool.parents[size] = parent;
        pool.depths[size] = depth;
        pool.draft_rows[size] = -1;
        pool.paths[size++] = std::min(double(child.path), pool.paths[parent]);
    }
    return size;
}

// The line along which path log-probabilities are calibrated: `count` points, rising.
struct Calibration {
    const double *from, *to;
    int64_t count;

    double worth(double log) const {  // exp(numpy.interp(log, from, to))
        const int64_t place = std::upper_bound(from, from + count, log) - from - 1;
        if (place < 0) return std::exp(to[0]);
        if (place == count - 1 || from[place] == log) return std::exp(to[place]);
        const double slope = (to[place + 1] - to[place]) / (from[place + 1] - from[place]);
        return std::exp(slope * (log - from[place]) + to[place]);
    }
};

std::vector<int64_t> falling(const std::vector<double>& values) {  // places, those of the greatest first
    std::vector<int64_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t one, int64_t other) { return values[one] > values[other]; });
    return order;
}

// The first place where what is offered is most beyond its price.
int64_t best_beyond(const double* prices, std::vector<double>::const_iterator begin,
                    std::vector<double>::const_iterator end) {
    int64_t best = 0;
    for (int64_t place = 1; place < end - begin; place++)
        if (begin[place] - prices[place] > begin[best] - prices[best]) best = place;
    return best;
}

bool all_within(const int64_t* rows, int64_t count, int64_t least, int64_t end) {
    return std::all_of(rows, rows + count, [=](int64_t row) { return least <= row && row < end; });
}

}  // namespace

// Add the best children of the nodes whose draft rows are `first` and those behind it to a pool of `size` candidates;
// return its new size. There is room for `most` more.
#define GROW(name, Real)                                                                                              \
    extern "C" int64_t name(const Real* log_probs, const Real* peaks, const int64_t* tokens, int64_t by_row,          \
                            int64_t frontier, int64_t columns, int64_t groups, int64_t* storage, int64_t capacity,    \
                            int64_t size, int64_t first, int64_t depth, double floor, int64_t most) {                 \
        return grow<Real>({log_probs, peaks, tokens, columns, groups, by_row}, Pool(storage, capacity), size, first,  \
                          frontier, depth, floor, most);                                                              \
    }
GROW(grow_float, float)
GROW(grow_double, double)

// Number candidates as expanded, from `first` on, and describe them: tokens, draft rows of parents and depths go to
// `told`, a row each; what each may see to its row of `seen`, which has `width` columns. False, and nothing is done,
// where one of `rows` is none of the `size` candidates, or the root.
extern "C" bool frontier(int64_t* storage, int64_t capacity, int64_t size, const int64_t* rows, int64_t count,
                         int64_t first, bool* seen, int64_t width, int64_t* told) {
    const Pool pool(storage, capacity);
    if (!all_within(rows, count, 1, size)) return false;
    for (int64_t place = 0; place < count; place++) {
        const int64_t row = rows[place], parent = pool.draft_rows[pool.parents[row]];
        told[place] = pool.tokens[row];
        told[count + place] = parent;
        told[2 * count + place] = pool.depths[row];
        std::copy_n(seen + parent * width, first - 1, seen + (first + place) * width);
    }
    for (int64_t place = 0; place < count; place++) pool.draft_rows[rows[place]] = first + place;
    return true;
}

// Put the `most` best candidates into `best`, the best first and of equals the first.
extern "C" void best_of_pool(int64_t* storage, int64_t capacity, int64_t size, int64_t most, int64_t* best) {
    const Pool pool(storage, capacity);
    std::copy_n(falling(std::vector<double>(pool.paths, pool.paths + size)).begin(), most, best);
}

// Make a tree of candidates, in the order of the pool: tokens, parents, depths, draft rows and path log-probabilities
// go to `told`, a row each; ancestors to `seen`. False where a parent is missing, or a candidate.
extern "C" bool tree(int64_t* storage, int64_t capacity, int64_t size, const int64_t* chosen, int64_t count,
                     int64_t* told, bool* seen) {
    const Pool pool(storage, capacity), made(told, count);
    if (!all_within(chosen, count, 0, size)) return false;
    std::vector<int64_t> rows(chosen, chosen + count);
    std::sort(rows.begin(), rows.end());
    std::fill_n(seen, count * count, false);
    for (int64_t place = 0; place < count; place++) {
        const int64_t row = rows[place], above = pool.parents[row];
        const int64_t parent =
            place == 0 ? -1 : std::lower_bound(rows.begin(), rows.begin() + place, above) - rows.begin();
        if (place > 0 && (parent == place || rows[parent] != above)) return false;
        made.tokens[place] = pool.tokens[row];
        made.parents[place] = parent;
        made.depths[place] = place == 0 ? 0 : made.depths[parent] + 1;
        made.draft_rows[place] = pool.draft_rows[row];
        made.paths[place] = pool.paths[row];
        if (place > 0) std::copy_n(seen + parent * count, place, seen + place * count);
        seen[place * count + place] = true;
    }
    return true;
}

// Copy `count` of `size` rows of so many bytes, one behind the other. False, and nothing is done, where one is missing.
extern "C" bool take(const char* from, int64_t size, const int64_t* rows, int64_t count, int64_t bytes, char* to) {
    if (!all_within(rows, count, 0, size)) return false;
    for (int64_t place = 0; place < count; place++) std::memcpy(to + place * bytes, from + rows[place] * bytes, bytes);
    return true;
}

// Lay out a forward: tokens, positions (`behind` more) and slots go to `ints`, a row of `padded` each, what its rows see
// to `mask`, rows of `keys`. `visible` is what `rows` see of as many `columns` behind a prefix; see
// `attention.tree_mask` for the rows that pad. The rows of `inputs` are `taken` ones of `states`; zero where they pad.
extern "C" bool lay_out(const int64_t* tokens, const int64_t* positions, const bool* visible, int64_t rows,
                        int64_t columns, int64_t prefix, int64_t padded, int64_t keys, int64_t behind, int64_t far,
                        int64_t* ints, bool* mask, const char* states, int64_t size, const int64_t* taken,
                        int64_t bytes, char* inputs) {
    if (inputs != nullptr) {
        if (taken == nullptr) std::memcpy(inputs, states, rows * bytes);
        else if (!take(states, size, taken, rows, bytes, inputs)) return false;
        std::memset(inputs + rows * bytes, 0, (padded - rows) * bytes);
    }
    for (int64_t row = 0; row < padded; row++) {
        const bool real = row < rows;
        bool* seen = mask + row * keys;
        ints[row] = real ? tokens[row] : 0;
        ints[padded + row] = real ? positions[row] + behind : far;
        ints[2 * padded + row] = prefix + columns - rows + row;
        std::fill_n(seen, prefix, true);
        std::fill_n(seen + prefix, keys - prefix, false);
        if (real) std::copy_n(visible + row * columns, columns, seen + prefix);
        else seen[prefix + columns + row - rows] = true;
    }
    return true;
}

// The place of the greatest of a row of half-precision logits, the first of equals; -1 where it is not positive. Such
// numbers are ordered as the integers of the same bits, which `verifiers/greedy.py` makes use of, too.
int64_t best(const int16_t* logits, int64_t row, int64_t columns) {
    const int16_t *begin = logits + row * columns, *end = begin + columns;
    int16_t greatest = 0;
    for (const int16_t* logit = begin; logit < end; logit++) greatest = std::max(greatest, *logit);
    return greatest > 0 ? std::find(begin, end, greatest) - begin : -1;
}

// Candidates, the best first, as calibrated; and as many of them as would be scored now.
struct Ranked {
    std::vector<int64_t> order;
    std::vector<double> worth;  // of the first `size` of them; the root is there anyway
    int64_t nodes;

    Ranked(const double* paths, int64_t all, int64_t size, const Calibration& trust, const double* prices)
        : order(falling(std::vector<double>(paths, paths + all))), worth{0} {
        std::vector<double> totals{0};
        for (int64_t place = 1; place < size; place++) {
            worth.push_back(trust.worth(paths[order[place]]));
            totals.push_back(totals.back() + worth.back());
        }
        nodes = best_beyond(prices, totals.begin(), totals.end());
    }
};

// Which of the newest candidates, those from `layer` on, are worth a layer below them: `Priced.expand`. `trees`, `further`
// and `layers` are prices by rows, from 1 to `most`. Rows go to `rows`, rising; returned is how many, or -1 where `most`
// is too few.
extern "C" int64_t layer_that_pays(const double* paths, int64_t size, int64_t layer, double floor, int64_t nodes,
                                   const double* from, const double* to, int64_t count, double carry, double row,
                                   const double* trees, const double* further, const double* layers, int64_t most,
                                   int64_t* rows) {
    const int64_t end = std::min(size, nodes + 1);
    if (std::max(size - layer, end) > most) return -1;
    const Calibration trust{from, to, count};
    std::vector<int64_t> able;
    for (int64_t place = layer; place < size; place++)
        if (paths[place] > floor) able.push_back(place);
    if (able.empty()) return 0;
    const Ranked now(paths, size, end, trust, trees);
    double price = further[now.nodes];
    if (0 < now.nodes && now.nodes < end - 1) price = std::min(price, now.worth[now.nodes]);
    std::vector<double> surplus, earned;
    for (int64_t place : able) surplus.push_back(trust.worth(paths[place]) - std::max(row, price));
    const auto order = falling(surplus);
    double sum = 0;
    for (int64_t place : order) earned.push_back(carry * (sum += surplus[place]));
    const auto stop = std::max_element(earned.begin(), earned.end()) + 1;  // further rows would earn less
    if (!(stop[-1] > 0)) return 0;
    const int64_t best = best_beyond(layers, earned.begin(), stop);
    if (!(earned[best] - layers[best] > 0)) return 0;
    for (int64_t place = 0; place <= best; place++) rows[place] = able[order[place]];
    std::sort(rows, rows + best + 1);
    return best + 1;
}

// Which candidates, the best `nodes` at most, are worth scoring: `Priced.select`. The root comes first, then the best.
extern "C" int64_t nodes_that_pay(const double* paths, int64_t size, int64_t nodes, const double* from, const double* to,
                                  int64_t count, const double* trees, int64_t most, int64_t* rows) {
    const int64_t end = std::min(size, nodes + 1);
    if (end > most) return -1;
    const Ranked now(paths, size, end, {from, to, count}, trees);
    std::copy_n(now.order.begin(), now.nodes + 1, rows);
    return now.nodes + 1;
}

// Follow the argmax down a tree, as `verifiers/base.py` does. Returns the row that its path ends at, times `columns`,
// plus the token behind it; -1 where `best` cannot tell.
extern "C" int64_t follow(const int64_t* tokens, const int64_t* parents, int64_t count, const int16_t* logits,
                          int64_t columns) {
    std::vector<int64_t> wanted = {best(logits, 0, columns)}, place(count, -1);
    int64_t end = 0;
    place[0] = 0;
    for (int64_t row = 1; row < count && wanted.back() >= 0; row++) {
        const int64_t above = place[parents[row]];
        if (above < 0 || tokens[row] != wanted[above]) continue;
        place[row] = above + 1;
        if (place[row] < int64_t(wanted.size())) continue;
        end = row;
        wanted.push_back(best(logits, row, columns));
    }
    return wanted.back() < 0 ? -1 : end * columns + wanted.back();
}
