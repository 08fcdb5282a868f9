// Random operations on the block pool, with its books checked along the way. Built by
// tests/rlkernels/test_sanitizers.py.
//   block_pool_fuzz OPERATIONS SEED
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

#include "block_pool.h"

using rlk::BlockPool;

int main(int argc, char** argv) {
  const long operations = std::atol(argv[1]);
  std::mt19937 random(unsigned(std::atol(argc > 2 ? argv[2] : "0")));
  const auto below = [&](long n) { return long(random() % unsigned(n)); };
  const long size = 1 + below(5);
  BlockPool pool(20 + below(40), size);
  std::vector<BlockPool::Handle> open;
  long refused = 0;
  // Few different tokens, so that prompts have beginnings in common.
  const auto some_tokens = [&](long most) {
    std::vector<BlockPool::Token> tokens(below(most + 1));
    for (auto& t : tokens) t = int32_t(below(8) ? 1 : below(3));
    return tokens;
  };
  for (long i = 0; i < operations; ++i) {
    const long free = pool.free_blocks(), cached = pool.cached_blocks();
    const long pick = open.empty() ? -1 : below(long(open.size()));
    try {
      const long what = below(16);
      if (what < 4 || pick < 0) {
        std::vector<std::vector<BlockPool::Token>> lists;
        for (long n = 1 + below(3); n > 0; --n) lists.push_back(some_tokens(8 * size));
        const std::vector<BlockPool::Tokens> prompts(lists.begin(), lists.end());
        for (const auto handle : pool.open_many(prompts)) open.push_back(handle);
      } else if (what < 7) {
        std::set<BlockPool::Handle> some{open[pick], open[below(long(open.size()))]};
        const std::vector<BlockPool::Handle> handles(some.begin(), some.end());
        std::vector<std::vector<BlockPool::Token>> lists;
        for (size_t n = 0; n < handles.size(); ++n) lists.push_back(some_tokens(2 * size));
        const std::vector<BlockPool::Tokens> tokens(lists.begin(), lists.end());
        pool.append(handles, tokens);
      } else if (what < 8) {
        pool.truncate(open[pick], below(long(pool.sequence(open[pick]).tokens.size()) + 1));
      } else if (what < 9) {
        for (const auto handle : pool.fork(open[pick], below(4))) open.push_back(handle);
      } else if (what < 12) {
        pool.commit(open[pick]);
      } else if (what < 15) {
        pool.close(open[pick]);
        open.erase(open.begin() + pick);
      } else if (below(4) == 0) {
        pool.advance_version();
      }
    } catch (const rlk::OutOfBlocks&) {
      ++refused;
      if (free != pool.free_blocks() || cached != pool.cached_blocks()) return std::puts("a refusal changed something"), 1;
      for (const auto handle : open) pool.close(handle);
      open.clear();
    }
    if (i < 2000 || i % 101 == 0) pool.check();
  }
  std::printf("%ld operations, %ld refused, %ld hits, %ld evictions\n", operations, refused, long(pool.hits()),
              long(pool.evictions()));
  return pool.hits() && pool.evictions() && refused ? 0 : 2;
}
