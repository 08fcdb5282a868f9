// Memory that is asked for before anything changes, so that what follows cannot fail.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

namespace rlk {

// Room for so many more. A vector grows by 1 / part of itself at least: 1 doubles it, which is quick and may waste half.
template <class T>
void make_room(std::vector<T>& v, size_t more, size_t part) {
  if (v.size() + more > v.capacity())
    v.reserve(std::max(v.size() + more, v.capacity() + v.capacity() / part + 64));
}

}  // namespace rlk
