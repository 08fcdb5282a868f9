#include "block_pool.h"

#include <algorithm>
#include <bit>
#include <string>
#include <unordered_map>

#include "make_room.h"

namespace rlk {

BlockPool::BlockPool(int64_t num_blocks, int64_t block_size)
    : block_size_(block_size), blocks_(num_blocks), tokens_(num_blocks * block_size),
      buckets_(std::bit_ceil(static_cast<uint64_t>(2 * num_blocks)), kNone), free_(num_blocks) {
  for (int64_t i = 0; i < num_blocks; ++i) free_[i] = int32_t(num_blocks - 1 - i);
}

const BlockPool::Sequence& BlockPool::sequence(Handle handle) const {
  if (handle < 0 || handle >= int64_t(sequences_.size()) || sequences_[handle].version < 0)
    throw std::invalid_argument("no open sequence has the handle " + std::to_string(handle));
  return sequences_[handle];
}

BlockPool::Sequence& BlockPool::at(Handle handle) { return const_cast<Sequence&>(sequence(handle)); }

// Room for so many more sequences and for all their handles: neither add nor close can fail.
void BlockPool::reserve_sequences(size_t more) {
  const size_t added = more - std::min(more, closed_.size());
  make_room(sequences_, added, 1);
  make_room(closed_, sequences_.size() + added - closed_.size(), 1);
}

BlockPool::Handle BlockPool::add(Sequence&& sequence) {
  if (closed_.empty()) {
    sequences_.push_back(std::move(sequence));
    return int64_t(sequences_.size()) - 1;
  }
  const Handle handle = closed_.back();
  closed_.pop_back();
  sequences_[handle] = std::move(sequence);
  return handle;
}

// Where the blocks of a prompt come from: a block of the tree, or -1 - n for the n-th new one.
struct BlockPool::Plan {
  std::vector<int32_t> blocks;
  int64_t shared = 0, committed = 0;
};

std::vector<BlockPool::Handle> BlockPool::open_many(std::span<const Tokens> prompts) {
  struct Planned {  // a full new block of this batch
    int32_t parent, number;
    const Token* tokens;
  };
  std::unordered_multimap<uint64_t, Planned> in_batch;
  std::vector<Plan> plans(prompts.size());
  std::vector<int32_t> unpinned;
  int64_t count = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const Tokens tokens = prompts[i];
    const int64_t blocks = blocks_for(tokens.size());
    Plan& plan = plans[i];
    const int64_t found = lookup(tokens, scratch_found_, scratch_hashes_);
    plan.blocks.assign(scratch_found_.begin(), scratch_found_.begin() + found);
    plan.shared = found * block_size_;
    plan.committed = found;
    for (const int32_t block : plan.blocks)
      if (blocks_[block].refs == 0) unpinned.push_back(block);
    bool shares = true;
    int32_t parent = found ? plan.blocks[found - 1] : kNone;
    for (int64_t b = found; b < blocks; ++b) {
      const bool full = (b + 1) * block_size_ <= int64_t(tokens.size());
      const bool may_share = shares && (b + 1) * block_size_ < int64_t(tokens.size());
      const Token* own = tokens.data() + b * block_size_;
      const Planned* same = nullptr;
      if (full && prompts.size() > 1) {
        const auto [first, last] = in_batch.equal_range(scratch_hashes_[b]);
        for (auto it = first; it != last && !same; ++it)
          if (it->second.parent == parent && std::equal(own, own + block_size_, it->second.tokens)) same = &it->second;
      }
      if (same && may_share) {
        parent = same->number;
        plan.shared += block_size_;
      } else {
        shares = false;
        const int32_t number = int32_t(-2 - count++);  // kNone is taken
        if (full && !same && prompts.size() > 1) in_batch.insert({scratch_hashes_[b], {parent, number, own}});
        parent = number;
      }
      plan.blocks.push_back(parent);
    }
  }
  std::sort(unpinned.begin(), unpinned.end());
  unpinned.erase(std::unique(unpinned.begin(), unpinned.end()), unpinned.end());
  require(count, int64_t(unpinned.size()));
  // All memory is asked for before anything changes.
  std::vector<int32_t> fresh(count);
  std::vector<Handle> handles;
  handles.reserve(prompts.size());
  std::vector<Sequence> opened(prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) opened[i].tokens.assign(prompts[i].begin(), prompts[i].end());
  reserve_sequences(prompts.size());
  for (const Plan& plan : plans)
    for (const int32_t block : plan.blocks)
      if (block >= 0) pin(block);
  for (int32_t& block : fresh) block = take();
  for (size_t i = 0; i < prompts.size(); ++i) {
    Plan& plan = plans[i];
    for (int32_t& block : plan.blocks)
      if (block < 0) {
        block = fresh[-2 - block];
        ++blocks_[block].refs;
      }
    const int64_t length = int64_t(prompts[i].size());
    hits_ += plan.shared;
    misses_ += length - plan.shared;
    Sequence& sequence = opened[i];
    sequence.table = std::move(plan.blocks);
    sequence.num_cached = sequence.computed = plan.shared;
    sequence.committed = plan.committed;
    sequence.version = version_;
    handles.push_back(add(std::move(sequence)));
  }
  return handles;
}

std::vector<std::pair<int32_t, int32_t>> BlockPool::append(std::span<const Handle> handles,
                                                           std::span<const Tokens> tokens) {
  int64_t need = 0;
  std::unordered_map<int32_t, int32_t> writers;  // how many of these sequences write into a block that they share
  for (size_t i = 0; i < handles.size(); ++i) {
    const Sequence& s = at(handles[i]);
    const int64_t length = int64_t(s.tokens.size());
    need += blocks_for(length + int64_t(tokens[i].size())) - int64_t(s.table.size());
    if (tokens[i].empty() || length % block_size_ == 0) continue;
    const Block& last = blocks_[s.table.back()];
    if (last.refs > 1 || last.in_tree) ++writers[s.table.back()];
  }
  for (const auto& [block, count] : writers)  // the last user of a block that is not in the tree may keep it
    need += blocks_[block].in_tree || count < blocks_[block].refs ? count : count - 1;
  require(need);
  std::vector<std::pair<int32_t, int32_t>> copies;
  // All memory is asked for before anything changes.
  copies.reserve(std::min(size_t(need), handles.size()));
  for (size_t i = 0; i < handles.size(); ++i) {
    Sequence& s = at(handles[i]);
    make_room(s.tokens, tokens[i].size(), 1);
    make_room(s.table, size_t(blocks_for(int64_t(s.tokens.size() + tokens[i].size()))) - s.table.size(), 1);
  }
  for (size_t i = 0; i < handles.size(); ++i) {
    Sequence& s = at(handles[i]);
    if (!tokens[i].empty() && s.tokens.size() % block_size_) {
      const int32_t last = s.table.back();
      if (blocks_[last].refs > 1 || blocks_[last].in_tree) {
        s.table.back() = take();
        ++blocks_[s.table.back()].refs;
        copies.emplace_back(last, s.table.back());
        release(last);
      }
    }
    s.tokens.insert(s.tokens.end(), tokens[i].begin(), tokens[i].end());
    while (int64_t(s.table.size()) < blocks_for(int64_t(s.tokens.size()))) {
      s.table.push_back(take());
      ++blocks_[s.table.back()].refs;
    }
  }
  return copies;
}

void BlockPool::truncate(Handle handle, int64_t length) {
  Sequence& s = at(handle);
  if (length < 0 || length > int64_t(s.tokens.size())) throw std::invalid_argument("length is outside the sequence");
  s.tokens.resize(length);
  while (int64_t(s.table.size()) > blocks_for(length)) {
    release(s.table.back());
    s.table.pop_back();
  }
  s.num_cached = std::min(s.num_cached, length);
  s.computed = std::min(s.computed, length);
  s.committed = std::min(s.committed, length / block_size_);
}

std::vector<BlockPool::Handle> BlockPool::fork(Handle handle, int64_t n) {
  std::vector<Sequence> children(n, at(handle));
  std::vector<Handle> handles;
  handles.reserve(n);
  reserve_sequences(n);
  for (const int32_t block : at(handle).table) blocks_[block].refs += int32_t(n);
  for (Sequence& child : children) {
    child.num_cached = child.computed = int64_t(child.tokens.size());
    handles.push_back(add(std::move(child)));
  }
  return handles;
}

void BlockPool::commit(Handle handle) {
  Sequence& s = at(handle);
  s.computed = int64_t(s.tokens.size());
  if (s.version != version_) return;
  int32_t parent = s.committed ? s.table[s.committed - 1] : kNone;
  uint64_t hash = s.committed ? blocks_[parent].hash : root();
  for (; s.committed < int64_t(s.tokens.size()) / block_size_; ++s.committed) {
    const Token* tokens = s.tokens.data() + s.committed * block_size_;
    hash = chain(hash, tokens);
    int32_t& own = s.table[s.committed];
    const int32_t there = find(hash, parent, tokens);
    if (there == kNone) {
      insert(own, hash, parent, tokens);
      pin(parent);  // own is in use
    } else if (there != own) {
      pin(there);
      release(own);
      own = there;
    }
    parent = own;
  }
}

void BlockPool::close(Handle handle) {
  Sequence& s = at(handle);
  for (auto block = s.table.rbegin(); block != s.table.rend(); ++block) release(*block);
  s = Sequence();
  closed_.push_back(handle);
}

void BlockPool::advance_version() {
  ++version_;
  if (cached_.size) {
    if (stale_.size) {
      blocks_[stale_.last].after = cached_.first;
      blocks_[cached_.first].before = stale_.last;
    } else {
      stale_.first = cached_.first;
    }
    stale_.last = cached_.last;
    stale_.size += cached_.size;
  }
  cached_ = List();
}

void BlockPool::check() const {
  const auto demand = [](bool good, const char* what) {
    if (!good) throw std::logic_error(what);
  };
  std::vector<int32_t> users(blocks_.size(), 0), seen(blocks_.size(), 0);
  for (const Sequence& s : sequences_) {
    if (s.version < 0) continue;
    demand(int64_t(s.table.size()) == blocks_for(int64_t(s.tokens.size())), "a table does not fit its tokens");
    for (size_t i = 0; i < s.table.size(); ++i) {
      const Block& b = blocks_[s.table[i]];
      ++users[s.table[i]];
      if (int64_t(i) >= s.committed) continue;
      demand(b.in_tree && b.version == s.version, "a committed block is not in the tree");
      demand(b.parent == (i ? s.table[i - 1] : kNone), "a block has another parent than in its sequence");
      demand(std::equal(s.tokens.begin() + i * block_size_, s.tokens.begin() + (i + 1) * block_size_,
                        tokens_.begin() + s.table[i] * block_size_), "a block holds other tokens than its sequence");
    }
  }
  for (const int32_t block : free_) {
    demand(!blocks_[block].in_tree && users[block] == 0, "a free block is in use");
    ++seen[block];
  }
  for (const List* list : {&cached_, &stale_}) {
    int64_t size = 0;
    for (int32_t block = list->first; block != kNone; block = blocks_[block].after, ++size) {
      demand(blocks_[block].in_tree && users[block] == 0, "a cached block is in use");
      demand((blocks_[block].version == version_) == (list == &cached_), "a block is in the wrong list");
      ++seen[block];
    }
    demand(size == list->size, "a list is broken");
  }
  for (const Block& b : blocks_)
    if (b.in_tree && b.refs && b.parent != kNone) ++users[b.parent];
  for (size_t i = 0; i < blocks_.size(); ++i) {
    demand(blocks_[i].refs == users[i], "a count of users is wrong");
    demand(seen[i] == (users[i] == 0), "a block is lost or in two lists");
    if (!blocks_[i].in_tree || blocks_[i].parent == kNone) continue;
    const Block& parent = blocks_[blocks_[i].parent];
    demand(parent.in_tree && parent.version == blocks_[i].version, "a block has lost its parent");
    demand(parent.refs >= (blocks_[i].refs > 0), "a pinned block has an unpinned parent");
  }
}

}  // namespace rlk
