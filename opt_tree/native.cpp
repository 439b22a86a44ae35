// What growing a tree does between two forwards of a drafter, in one call instead of some thirty operations of numpy.
//
// Each of those is paid for in cold caches: a forward has just pushed everything out. The arithmetic is that of
// `CandidatePool._add` and `TopK.pick`, operation by operation, so that both give the same bits; numpy is the reference.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
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

    Pool(int64_t* integers, double* paths, int64_t capacity)
        : tokens(integers), parents(integers + capacity), depths(integers + 2 * capacity),
          draft_rows(integers + 3 * capacity), paths(paths) {}
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

}  // namespace

// Add the best children of the nodes whose draft rows are `first` and those behind it to a pool of `size` candidates;
// return its new size. There is room for `most` more.
#define GROW(name, Real)                                                                                              \
    extern "C" int64_t name(const Real* log_probs, const Real* peaks, const int64_t* tokens, int64_t by_row,          \
                            int64_t frontier, int64_t columns, int64_t groups, int64_t* integers, double* paths,      \
                            int64_t capacity, int64_t size, int64_t first, int64_t depth, double floor,               \
                            int64_t most) {                                                                           \
        return grow<Real>({log_probs, peaks, tokens, columns, groups, by_row}, Pool(integers, paths, capacity), size, \
                          first, frontier, depth, floor, most);                                                       \
    }
GROW(grow_float, float)
GROW(grow_double, double)
