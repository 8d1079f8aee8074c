// Memory of the simulated device, which the host cannot touch, and pinned memory of the host.
//
// Device memory is one file, mapped twice: at the addresses that torch gets nobody may read or write, at the others
// tasks do. No address is used twice. Memory that is given back while another stream may still use it is an error,
// unless record_stream said so, or the streams are in order: a real allocator would hand it to somebody else.
#pragma once
#include <c10/core/Allocator.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>

#include <cstring>
#include <list>
#include <set>

#include "streams.h"

namespace simulated {

constexpr size_t kPage = 4096, kSpace = size_t(1) << 36;
constexpr int kPoison = 0xA5;  // what is in memory that nobody has written

struct Block {
  size_t size;
  int64_t stream;
  std::map<int64_t, uint64_t> uses;  // by tasks of other streams
  std::set<int64_t> recorded;        // streams that record_stream has told of
};
struct Pinned {
  size_t size;
  std::vector<Mark> users;
};

inline std::map<char*, Block> blocks;
inline std::map<char*, Pinned> pinned;
inline std::list<std::pair<char*, std::vector<Mark>>> given_back, unpinned;  // that streams still use
inline char *device_base = nullptr, *shadow_base = nullptr;
inline size_t used_bytes = 0;
inline int memory_file = -1;
inline pid_t owner = 0;

// In a forked process anew: what its parent had there stays the parent's.
inline void open_memory() {
  blocks.clear(), streams.clear(), given_back.clear();
  owner = getpid(), used_bytes = 0;
  memory_file = memfd_create("simulated-device", MFD_CLOEXEC);
  TORCH_CHECK(memory_file >= 0 && ftruncate(memory_file, kSpace) == 0, "simulated device: no memory");
  auto map = [](int rights) { return mmap(nullptr, kSpace, rights, MAP_SHARED | MAP_NORESERVE, memory_file, 0); };
  device_base = static_cast<char*>(map(PROT_NONE));
  shadow_base = static_cast<char*>(map(PROT_READ | PROT_WRITE));
  TORCH_CHECK(device_base != MAP_FAILED && shadow_base != MAP_FAILED, "simulated device: no room for its memory");
}

inline bool all_done(const std::vector<Mark>& marks) {
  for (auto& mark : marks)
    if (!is_done(mark)) return false;
  return true;
}

inline void erase(char* p) {
  auto found = blocks.find(p);
  if (found == blocks.end()) return;
  fallocate(memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, p - device_base, found->second.size);
  blocks.erase(found);
}

inline void sweep() {
  given_back.remove_if([](auto& one) { return all_done(one.second) && (erase(one.first), true); });
  unpinned.remove_if([](auto& one) { return all_done(one.second) && (std::free(one.first), true); });
}

inline void* allocate(size_t size) {
  std::lock_guard guard(lock);
  if (owner != getpid()) open_memory();
  sweep();
  size = (std::max<size_t>(size, 1) + kPage - 1) / kPage * kPage;
  TORCH_CHECK(used_bytes + size <= kSpace, "simulated device: out of memory");
  char* p = device_base + used_bytes;
  used_bytes += size;
  memset(shadow_base + (p - device_base), kPoison, size);
  blocks[p] = {size, current, {}, {}};
  return p;
}

inline void release(void* pointer) {
  if (!pointer) return;
  std::lock_guard guard(lock);
  auto p = static_cast<char*>(pointer);
  auto found = blocks.find(p);
  if (owner != getpid() || found == blocks.end()) return;
  auto& block = found->second;
  std::vector<Mark> users;
  for (auto& [id, at] : block.uses) {
    if (block.recorded.count(id)) continue;
    if (streams[id].done < at && streams[block.stream].seen[id] < at)
      fail("memory was given back while stream " + std::to_string(id) + " still needs it: record_stream is missing");
  }
  for (int64_t id : block.recorded) users.push_back(mark_of(id));
  submit([p, users] { given_back.emplace_back(p, users); }, block.stream);
}

inline Block& block_of(const void* pointer) {
  auto p = static_cast<char*>(const_cast<void*>(pointer));
  auto found = blocks.upper_bound(p);
  TORCH_CHECK(found != blocks.begin(), "this is not memory of the device");
  --found;
  TORCH_CHECK(p < found->first + found->second.size, "memory was used after it was given back");
  return found->second;
}

// Where a task finds what the host knows by this address.
inline char* shadow(const void* pointer) {
  block_of(pointer);
  return shadow_base + (static_cast<const char*>(pointer) - device_base);
}

// The next task of the current stream uses this memory.
inline void note_use(const void* pointer) {
  std::lock_guard guard(lock);
  auto& block = block_of(pointer);
  if (block.stream != current) block.uses[current] = streams[current].given + 1;
}

inline void record_stream(void* pointer, int64_t id) {
  std::lock_guard guard(lock);
  if (pointer) block_of(pointer).recorded.insert(id);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* p = size ? simulated::allocate(size) : nullptr;
    return {p, p, &release, c10::Device(c10::kPrivateUse1, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    note_use(to), note_use(from);
    submit([=] { memcpy(shadow(to), shadow(from), size); });
  }
};
inline Allocator allocator;

// Waits for nobody: what a copy under way still needs is freed when that has run.
inline void unpin(void* pointer) {
  std::lock_guard guard(lock);
  auto found = pinned.find(static_cast<char*>(pointer));
  unpinned.emplace_back(found->first, found->second.users);
  pinned.erase(found);
  sweep();
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, kPage, std::max<size_t>(size, 1)) == 0, "simulated device: no pinned memory");
    std::lock_guard guard(lock);
    memset(p, kPoison, size);
    pinned[static_cast<char*>(p)] = {std::max<size_t>(size, 1), {}};
    return {p, p, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
inline PinnedAllocator pinned_allocator;

inline Pinned* pinned_of(const void* pointer) {
  auto p = static_cast<char*>(const_cast<void*>(pointer));
  auto found = pinned.upper_bound(p);
  if (found == pinned.begin()) return nullptr;
  --found;
  return p < found->first + found->second.size ? &found->second : nullptr;
}

inline bool is_pinned(const void* pointer) {
  std::lock_guard guard(lock);
  return pinned_of(pointer) != nullptr;
}

}  // namespace simulated
