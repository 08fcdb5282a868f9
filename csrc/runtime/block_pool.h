// Which block of the KV cache holds which tokens: block pool and prefix tree.
//
// Does exactly what rlkernels/prefix_cache/block_pool.py does, which explains it; tests compare the two step by step.
// Beyond that: a chained 64-bit hash finds a block of the tree, its parent and its tokens are then compared; the lists
// of unpinned blocks are linked through the blocks, so that every operation on a block takes constant time.
#pragma once
#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

namespace rlk {

struct OutOfBlocks : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class BlockPool {
 public:
  using Token = int32_t;
  using Tokens = std::span<const Token>;
  using Handle = int64_t;

  BlockPool(int64_t num_blocks, int64_t block_size);

  std::vector<Handle> open_many(std::span<const Tokens> prompts);
  // Blocks (from, to) whose contents must be copied first.
  std::vector<std::pair<int32_t, int32_t>> append(std::span<const Handle> handles, std::span<const Tokens> tokens);
  void truncate(Handle handle, int64_t length);
  std::vector<Handle> fork(Handle handle, int64_t n);
  void commit(Handle handle);
  void close(Handle handle);
  void advance_version();

  struct Sequence {
    std::vector<Token> tokens;
    std::vector<int32_t> table;
    int64_t num_cached = 0, computed = 0, committed = 0;
    int64_t version = -1;  // -1: closed
  };
  const Sequence& sequence(Handle handle) const;
  int64_t block_size() const { return block_size_; }
  int64_t num_blocks() const { return int64_t(blocks_.size()); }
  int64_t version() const { return version_; }
  int64_t hits() const { return hits_; }
  int64_t misses() const { return misses_; }
  int64_t evictions() const { return evictions_; }
  int64_t free_blocks() const { return int64_t(free_.size()) + stale_.size; }
  int64_t cached_blocks() const { return cached_.size; }
  // Walks everything and throws std::logic_error where the books do not balance; for tests.
  void check() const;

 private:
  static constexpr int32_t kNone = -1;
  struct Block {
    int32_t refs = 0;  // sequences that use it, and pinned children in the tree
    int32_t parent = kNone;            // kNone: a first block
    int32_t before = kNone, after = kNone;  // in its list of unpinned blocks
    int32_t next_in_bucket = kNone;
    bool in_tree = false;
    int64_t version = 0;
    uint64_t hash = 0;  // of the tokens from the start of the sequence to the end of this block, and the version
  };
  struct List {
    int32_t first = kNone, last = kNone;
    int64_t size = 0;
  };
  struct Plan;

  Sequence& at(Handle handle);
  void reserve_sequences(size_t more);
  Handle add(Sequence&& sequence);
  int64_t blocks_for(int64_t length) const { return (length + block_size_ - 1) / block_size_; }
  void require(int64_t need, int64_t reserved = 0) const;
  int32_t take();
  void pin(int32_t block);
  void release(int32_t block);
  void push_back(List& list, int32_t block);
  void unlink(List& list, int32_t block);
  uint64_t root() const;
  uint64_t chain(uint64_t hash, const Token* tokens) const;
  int32_t find(uint64_t hash, int32_t parent, const Token* tokens) const;
  void insert(int32_t block, uint64_t hash, int32_t parent, const Token* tokens);
  void forget(int32_t block);
  int64_t lookup(Tokens tokens, std::vector<int32_t>& found, std::vector<uint64_t>& hashes) const;

  int64_t block_size_, version_ = 0, hits_ = 0, misses_ = 0, evictions_ = 0;
  std::vector<Block> blocks_;
  std::vector<Token> tokens_;      // [num_blocks, block_size], of blocks in the tree
  std::vector<int32_t> buckets_;   // first block of each chain; a power of two of them
  std::vector<int32_t> free_;
  List cached_, stale_;
  std::vector<Sequence> sequences_;
  std::vector<Handle> closed_;  // handles to give out again
  std::vector<int32_t> scratch_found_;
  std::vector<uint64_t> scratch_hashes_;
};

}  // namespace rlk
