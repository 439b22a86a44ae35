// OPT-Tree over a table that counts what followed what: looked up, interpolated and grown in one call a step.
//
// `drafters/store.py` and `drafters/ngram.py` say what a table is, `node_by_node.py` how a tree grows over one. Python is
// the reference: the arithmetic here is its own, operation by operation.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr double LEAST = 5e-3;  // `ngram._LEAST`

using State = uint64_t;  // of a run of tokens: its hash, whose highest bits are its key in a store

State longer(State run, int64_t token) { return (run + token + 1) * 0x9E3779B97F4A7C15; }  // one token more before it

// An array of a store, of unsigned integers of 1 to 8 bytes.
struct Numbers {
    const char* begin = nullptr;
    int64_t bytes = 1;

    uint64_t operator[](int64_t place) const {
        switch (bytes) {
            case 1: return reinterpret_cast<const uint8_t*>(begin)[place];
            case 2: return reinterpret_cast<const uint16_t*>(begin)[place];
            case 4: return reinterpret_cast<const uint32_t*>(begin)[place];
            default: return reinterpret_cast<const uint64_t*>(begin)[place];
        }
    }
};

// What followed each run in texts known beforehand: see `drafters/store.py`, which checks how long and where the arrays
// are. What they say is not trusted: whatever it is, no number is read but theirs.
struct Store {
    Numbers keys, first, totals, tokens, counts;
    uint64_t runs, entries, bits, vocab;

    uint64_t key(State state) const { return state >> (64 - bits); }

    // About where a key lies, if it does: keys are hashes, the n-th of all is about n times their mean distance.
    uint64_t guess(uint64_t key) const { return static_cast<unsigned __int128>(key) * runs >> bits; }

    // The place of a run; `runs` where it is not there.
    uint64_t find(State state) const {
        if (runs == 0) return 0;
        const uint64_t wanted = key(state);
        uint64_t low = guess(wanted), high, found = keys[low];
        // Once more from there: what is left is then some ten places.
        low = found < wanted ? low + std::min(guess(wanted - found), runs - 1 - low) : low - std::min(guess(found - wanted), low);
        high = low;
        for (uint64_t width = 4; low > 0 && keys[low] >= wanted; width *= 2) low -= std::min(low, width);
        for (uint64_t width = 4; high < runs && keys[high] < wanted; width *= 2) high += std::min(runs - high, width);
        while (low < high) {
            const uint64_t middle = (low + high) / 2;
            if (keys[middle] < wanted) low = middle + 1;
            else high = middle;
        }
        return low < runs && keys[low] == wanted ? low : runs;
    }

    void prefetch(State state) const {
        if (runs > 0) __builtin_prefetch(keys.begin + guess(key(state)) * keys.bytes);
    }
};

// What followed a run in the text at hand: tokens in the order in which they first did, each with the times it did.
struct Followers {
    int64_t total = 0;
    std::vector<std::pair<int64_t, int64_t>> counts;

    void add(int64_t token) {
        total++;
        for (auto& [known, times] : counts)
            if (known == token) {
                times++;
                return;
            }
        counts.emplace_back(token, 1);
    }
};

// {token: probability}, in the order in which tokens came.
struct Law {
    std::vector<int64_t> tokens;
    std::vector<double> probs;

    // A token that is there already is among the first `known` ones.
    void add(int64_t token, double prob, size_t known) {
        const auto end = tokens.begin() + known, found = std::find(tokens.begin(), end, token);
        if (found != end) {
            probs[found - tokens.begin()] += prob;
        } else {
            tokens.push_back(token);
            probs.push_back(prob);
        }
    }
};

class Table {
  public:
    Table(std::vector<double> beta, double weight, Store store) : beta_(std::move(beta)), weight_(weight), store_(store) {}

    void count(const int64_t* tokens, int64_t count) {  // `Counts.add`
        for (int64_t place = 0; place < count; place++) {
            State run = 0;
            for (auto token = tail_.rbegin(); token != tail_.rend(); token++)
                text_[run = longer(run, *token)].add(tokens[place]);
            tail_.push_back(tokens[place]);
            if (tail_.size() > beta_.size()) tail_.erase(tail_.begin());
        }
    }

    // What follows a run whose tokens are given from the last one back: `interpolate`.
    void interpolate(const std::vector<int64_t>& back, Law& law) {
        auto& runs = runs_;
        auto& text = known_;
        runs.clear(), text.clear(), law.tokens.clear(), law.probs.clear();
        for (int64_t token : back) {
            runs.push_back(longer(runs.empty() ? 0 : runs.back(), token));
            store_.prefetch(runs.back());
        }
        for (State run : runs) {
            const auto found = text_.find(run);
            if (found == text_.end()) break;  // then no longer run was followed either
            text.push_back(&found->second);
        }
        double share = 1;
        for (size_t length = runs.size(); length > 0 && share >= LEAST; length--) {
            const uint64_t place = store_.find(runs[length - 1]);
            const Followers* local = length <= text.size() ? text[length - 1] : nullptr;
            double evidence = place < store_.runs ? double(store_.totals[place]) : 0;
            if (local) evidence += weight_ * double(local->total);
            if (evidence == 0) continue;
            const double scale = share / (evidence + beta_[length - 1]);
            if (place < store_.runs) add(place, scale, law);
            const size_t known = law.tokens.size();
            if (local)
                for (const auto& [token, times] : local->counts) law.add(token, weight_ * times * scale, known);
            share = beta_[length - 1] * scale;
        }
    }

    size_t order() const { return beta_.size(); }

  private:
    std::vector<double> beta_;
    double weight_;
    Store store_;
    std::unordered_map<State, Followers> text_;
    std::vector<int64_t> tail_;
    std::vector<State> runs_;  // of a tail that is asked about
    std::vector<const Followers*> known_;

    void add(uint64_t place, double scale, Law& law) const {
        const uint64_t end = std::min(store_.first[place + 1], store_.entries);
        for (uint64_t entry = store_.first[place]; entry < end; entry++) {
            if (store_.tokens[entry] >= store_.vocab) continue;
            const double prob = double(store_.counts[entry]) * scale;
            if (prob < LEAST) break;  // the most frequent ones come first
            law.add(int64_t(store_.tokens[entry]), prob, law.tokens.size());
        }
    }
};

struct Node {
    double cost;  // minus its path's log-probability
    int64_t depth, token, parent, place, draft_row;  // place: among its siblings
};

// The nodes of a step, and which of them are the best so far.
class Growing {
  public:
    Growing(Table& table, const int64_t* context, int64_t length, size_t most)
        : table_(table), context_(context), length_(length), most_(most) {
        nodes_.reserve(256), best_.reserve(most + 2), law_.tokens.reserve(64), law_.probs.reserve(64);
        nodes_.push_back({0, 0, context[length - 1], -1, 0, -1});
        best_.push_back(0);
    }

    // Begin with candidates: what `CandidatePool` says of each.
    void begin(int64_t size, const int64_t* tokens, const int64_t* parents, const int64_t* depths,
               const int64_t* draft_rows, const double* paths) {
        nodes_.clear(), best_.clear();
        for (int64_t row = 0; row < size; row++) {
            nodes_.push_back({-paths[row], depths[row], tokens[row], parents[row], row, draft_rows[row]});
            best_.push_back(row);
            asked_ = std::max(asked_, draft_rows[row] + 1);
        }
        std::sort(best_.begin(), best_.end(), [this](auto one, auto other) { return better(one, other); });
        if (best_.size() > most_ + 1) best_.resize(most_ + 1);
    }

    // Ask about the best nodes from depth `first` on, below `last`. What one adds stands behind it.
    void grow(int64_t first, int64_t last) {
        for (size_t place = 0; place < std::min(best_.size(), most_); place++) {
            const int64_t at = best_[place];
            if (first <= nodes_[at].depth && nodes_[at].depth < last) ask(at);
        }
    }

    double expected() const {
        double sum = 0;
        for (size_t place = 1; place < best_.size(); place++) sum += std::exp(-nodes_[best_[place]].cost);
        return sum;
    }

    // Write the tree, in the order in which the loop would draft it: see `native.cpp`, `tree`.
    int64_t tree(int64_t* told, int64_t capacity, bool* seen) {
        std::sort(best_.begin(), best_.end(), [this](auto one, auto other) { return sooner(one, other); });
        const int64_t count = best_.size();
        std::vector<int64_t> row(nodes_.size(), -1);
        std::fill_n(seen, count * count, false);
        for (int64_t place = 0; place < count; place++) {
            const Node& node = nodes_[best_[place]];
            const int64_t parent = node.parent < 0 ? -1 : row[node.parent];
            const double path = 0.0 - node.cost;
            row[best_[place]] = place;
            told[place] = node.token, told[capacity + place] = parent, told[2 * capacity + place] = node.depth;
            told[3 * capacity + place] = node.draft_row;
            std::memcpy(told + 4 * capacity + place, &path, sizeof path);
            if (parent >= 0) std::copy_n(seen + parent * count, place, seen + place * count);
            seen[place * count + place] = true;
        }
        return count;
    }

  private:
    Table& table_;
    const int64_t* context_;
    int64_t length_;
    size_t most_;
    std::vector<Node> nodes_;
    std::vector<int64_t> best_;  // the best first
    int64_t asked_ = 0;
    Law law_;
    std::vector<int64_t> back_;

    bool sooner(int64_t one, int64_t other) const {  // in the order of depths, then of paths
        if (nodes_[one].depth != nodes_[other].depth) return nodes_[one].depth < nodes_[other].depth;
        while (nodes_[one].parent != nodes_[other].parent) one = nodes_[one].parent, other = nodes_[other].parent;
        return nodes_[one].place < nodes_[other].place;
    }

    bool better(int64_t one, int64_t other) const {
        return nodes_[one].cost != nodes_[other].cost ? nodes_[one].cost < nodes_[other].cost : sooner(one, other);
    }

    void ask(int64_t at) {
        const double cost = nodes_[at].cost;
        nodes_[at].draft_row = asked_++;
        const double most = best_.size() > most_ ? nodes_[best_.back()].cost : std::numeric_limits<double>::infinity();
        const double least = std::exp(cost - most) * (1 - 1e-9);
        back_.clear();
        int64_t above = at;
        for (; above >= 0 && back_.size() < table_.order(); above = nodes_[above].parent)
            back_.push_back(nodes_[above].token);
        for (int64_t place = length_ - 2; place >= 0 && back_.size() < table_.order(); place--)
            back_.push_back(context_[place]);
        table_.interpolate(back_, law_);
        for (size_t child = 0; child < law_.tokens.size(); child++) {
            if (!(law_.probs[child] > least)) continue;
            const double path = std::max(cost - std::log(law_.probs[child]), cost);
            const int64_t node = nodes_.size();
            nodes_.push_back({path, nodes_[at].depth + 1, law_.tokens[child], at, int64_t(child), -1});
            const auto place = std::upper_bound(best_.begin(), best_.end(), node,
                                                [this](auto one, auto other) { return better(one, other); });
            best_.insert(place, node);
            if (best_.size() > most_ + 1) best_.pop_back();
        }
    }
};

}  // namespace

// A table with `beta` for runs of 1 to `order` tokens, and the text at hand at a weight, not counted yet. A store's
// arrays begin at `places`, with numbers of `widths` bytes; `sizes` are its runs, entries, bits and vocabulary.
extern "C" void* new_table(const double* beta, int64_t order, double weight, const int64_t* places,
                           const int64_t* widths, const int64_t* sizes) {
    Store store{};
    Numbers* const columns[] = {&store.keys, &store.first, &store.totals, &store.tokens, &store.counts};
    uint64_t* const numbers[] = {&store.runs, &store.entries, &store.bits, &store.vocab};
    for (int64_t place = 0; place < 5; place++) *columns[place] = {reinterpret_cast<const char*>(places[place]), widths[place]};
    for (int64_t place = 0; place < 4; place++) *numbers[place] = sizes[place];
    return new Table(std::vector<double>(beta, beta + order), weight, store);
}

extern "C" void free_table(Table* table) { delete table; }

extern "C" void count_text(Table* table, const int64_t* tokens, int64_t count) { table->count(tokens, count); }

// Grow a tree of `most` nodes behind the last tokens of a context, asking from depth `first` to above `limit`: see
// `node_by_node.grow`. It begins with `size` candidates where there are any. Tokens, parents, depths, draft rows and
// paths go to `told`, rows of `most` + 1; ancestors to `seen`. Returned is how many rows the tree has.
extern "C" int64_t grow_over_table(Table* table, const int64_t* context, int64_t length, int64_t size,
                                   const int64_t* tokens, const int64_t* parents, const int64_t* depths,
                                   const int64_t* draft_rows, const double* paths, int64_t most, double threshold,
                                   int64_t first, int64_t limit, int64_t* told, bool* seen) {
    Growing growing(*table, context, length, most);
    if (size > 0) growing.begin(size, tokens, parents, depths, draft_rows, paths);
    if (threshold == 0) growing.grow(first, limit);
    for (int64_t depth = first; threshold != 0 && depth < limit; depth++) {
        const double before = growing.expected();
        growing.grow(depth, depth + 1);
        if (growing.expected() - before <= threshold) break;
    }
    return growing.tree(told, most + 1, seen);
}
