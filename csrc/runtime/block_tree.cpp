// Blocks of the pool, and the tree of those whose contents are known.
#include "block_pool.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace rlk {
namespace {

// Folded 64 x 64 -> 128 bit product: two words in, well mixed bits out.
uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a ^ 0x9E3779B97F4A7C15u) * (b ^ 0xD1B54A32D192ED03u);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

void BlockPool::require(int64_t need, int64_t reserved) const {
  const int64_t available = free_blocks() + cached_blocks() - reserved;
  if (need > available)
    throw OutOfBlocks(std::to_string(need) + " blocks are needed, " + std::to_string(available) + " of " +
                      std::to_string(num_blocks()) + " are free or evictable: close what has ended of the " +
                      std::to_string(sequences_.size() - closed_.size()) + " open sequences, or make a larger cache");
}

// An unused block, not pinned yet.
int32_t BlockPool::take() {
  if (!free_.empty()) {
    const int32_t block = free_.back();
    free_.pop_back();
    return block;
  }
  List& list = stale_.size ? stale_ : cached_;
  evictions_ += &list == &cached_;
  const int32_t block = list.first;
  unlink(list, block);
  forget(block);
  return block;
}

// Counts one more user of a block that is in the tree. The first user pins the parents too.
void BlockPool::pin(int32_t block) {
  while (block != kNone && blocks_[block].refs++ == 0) {
    unlink(cached_, block);
    block = blocks_[block].parent;
  }
}

void BlockPool::release(int32_t block) {
  while (block != kNone && --blocks_[block].refs == 0) {
    const Block& b = blocks_[block];
    if (!b.in_tree) {
      free_.push_back(block);
      return;
    }
    push_back(b.version == version_ ? cached_ : stale_, block);
    block = b.parent;
  }
}

void BlockPool::push_back(List& list, int32_t block) {
  blocks_[block].before = list.last;
  blocks_[block].after = kNone;
  (list.size ? blocks_[list.last].after : list.first) = block;
  list.last = block;
  ++list.size;
}

void BlockPool::unlink(List& list, int32_t block) {
  const Block& b = blocks_[block];
  (b.before == kNone ? list.first : blocks_[b.before].after) = b.after;
  (b.after == kNone ? list.last : blocks_[b.after].before) = b.before;
  --list.size;
}

uint64_t BlockPool::root() const { return mix(uint64_t(version_), 0x2545F4914F6CDD1Du); }

uint64_t BlockPool::chain(uint64_t hash, const Token* tokens) const {
  int64_t i = 0;
  for (; i + 3 < block_size_; i += 4) {
    uint64_t words[2];
    std::memcpy(words, tokens + i, sizeof words);
    hash = mix(hash ^ words[0], words[1]);
  }
  for (; i < block_size_; ++i) hash = mix(hash ^ uint32_t(tokens[i]), 0);
  return hash;
}

int32_t BlockPool::find(uint64_t hash, int32_t parent, const Token* tokens) const {
  for (int32_t block = buckets_[hash & (buckets_.size() - 1)]; block != kNone; block = blocks_[block].next_in_bucket) {
    const Block& b = blocks_[block];
    if (b.hash == hash && b.parent == parent && b.version == version_ &&
        std::memcmp(tokens_.data() + block * block_size_, tokens, block_size_ * sizeof(Token)) == 0)
      return block;
  }
  return kNone;
}

void BlockPool::insert(int32_t block, uint64_t hash, int32_t parent, const Token* tokens) {
  Block& b = blocks_[block];
  int32_t& bucket = buckets_[hash & (buckets_.size() - 1)];
  b.hash = hash;
  b.parent = parent;
  b.version = version_;
  b.in_tree = true;
  b.next_in_bucket = bucket;
  bucket = block;
  std::copy(tokens, tokens + block_size_, tokens_.data() + block * block_size_);
}

void BlockPool::forget(int32_t block) {
  Block& b = blocks_[block];
  int32_t* link = &buckets_[b.hash & (buckets_.size() - 1)];
  while (*link != block) link = &blocks_[*link].next_in_bucket;
  *link = b.next_in_bucket;
  b.in_tree = false;
}

// The blocks of the tree that hold the beginning of these tokens, at least one token left out -> how many; also the
// hashes of all full blocks. Hashes do not depend on what is found, so that memory is asked for well before its use.
int64_t BlockPool::lookup(Tokens tokens, std::vector<int32_t>& found, std::vector<uint64_t>& hashes) const {
  const int64_t full = int64_t(tokens.size()) / block_size_, most = std::max<int64_t>(0, int64_t(tokens.size()) - 1) / block_size_;
  hashes.resize(full);
  found.resize(full);
  uint64_t hash = root();
  for (int64_t i = 0; i < full; ++i) {
    hashes[i] = hash = chain(hash, tokens.data() + i * block_size_);
    __builtin_prefetch(&buckets_[hash & (buckets_.size() - 1)]);
  }
  constexpr int64_t kAhead = 8;
  int64_t count = 0;
  for (int64_t i = 0; i < most + kAhead; ++i) {
    if (i < most) {
      const int32_t first = buckets_[hashes[i] & (buckets_.size() - 1)];
      if (first != kNone) {
        __builtin_prefetch(&blocks_[first]);
        const char* line = reinterpret_cast<const char*>(tokens_.data() + first * block_size_);
        for (int64_t byte = 0; byte < int64_t(block_size_ * sizeof(Token)) && byte < 256; byte += 64)
          __builtin_prefetch(line + byte);
      }
    }
    if (i < kAhead) continue;
    const int64_t now = i - kAhead;
    const int32_t block = find(hashes[now], now ? found[now - 1] : kNone, tokens.data() + now * block_size_);
    if (block == kNone) break;
    found[now] = block;
    ++count;
  }
  return count;
}

}  // namespace rlk
