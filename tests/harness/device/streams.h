// Streams of the simulated device: everything is queued, and runs in the thread that waits for it.
//
// Late: a task runs when somebody waits for it, and not before. Early: it runs where it is given. Nothing else may
// decide when it runs, so a program that is right gets the same bits in both, and one that forgot to wait does not.
// A query of something unfinished runs one task: who polls gets on.
//
// An error in a task is the device's: the next call from the host throws it, and so do all after it.
#pragma once
#include <c10/util/Exception.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace simulated {

using Task = std::function<void()>;
using Seen = std::map<int64_t, uint64_t>;  // stream -> how many of its tasks come before

struct Stream {
  std::deque<Task> queue;
  uint64_t given = 0, done = 0;
  double busy_ms = 0;  // how long its tasks took
  Seen seen;           // what of other streams the last task given comes after
};

// A place in a stream: after so many of its tasks.
struct Mark {
  int64_t stream;
  uint64_t at;
  Seen seen;
  std::shared_ptr<double> time_ms;  // of the stream when it came there, where somebody wants to know
};

inline std::recursive_mutex lock;
inline bool early = false;
inline uint64_t tasks_run = 0;
inline std::map<int64_t, Stream> streams;
inline int64_t next_stream = 1;
inline thread_local int64_t current = 0;
inline std::string failure;
inline std::map<int64_t, std::map<std::string, uint64_t>> blocked;  // thread -> in what way the host waited -> times
inline std::function<void(const std::string&)> on_blocked;

inline void fail(const std::string& why) {
  std::lock_guard guard(lock);
  if (failure.empty()) failure = why;
}

inline void check() {
  std::lock_guard guard(lock);
  TORCH_CHECK(failure.empty(), "simulated device: ", failure);
}

inline void run_one(Stream& stream) {
  Task task = std::move(stream.queue.front());
  stream.queue.pop_front();
  auto began = std::chrono::steady_clock::now();
  try {
    task();
  } catch (const c10::Error& error) {
    fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(error.what());
  }
  stream.busy_ms += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
  ++stream.done, ++tasks_run;
}

inline void run_until(int64_t id, uint64_t at) {
  std::lock_guard guard(lock);
  auto& stream = streams[id];
  while (stream.done < at) run_one(stream);
}

inline void wait(const Mark& mark) { run_until(mark.stream, mark.at); }

inline bool is_done(const Mark& mark) {
  std::lock_guard guard(lock);
  return streams[mark.stream].done >= mark.at;
}

inline bool query(const Mark& mark) {
  std::lock_guard guard(lock);
  auto& stream = streams[mark.stream];
  if (stream.done >= mark.at) return true;
  run_one(stream);
  return stream.done >= mark.at;
}

inline Mark mark_of(int64_t id) {
  std::lock_guard guard(lock);
  auto& stream = streams[id];
  Mark mark{id, stream.given, stream.seen, nullptr};
  mark.seen[id] = stream.given;
  return mark;
}

inline Mark submit(Task task, int64_t id) {
  std::lock_guard guard(lock);
  auto& stream = streams[id];
  stream.queue.push_back(std::move(task));
  ++stream.given;
  Mark mark = mark_of(id);
  if (early) wait(mark);
  return mark;
}

inline Mark submit(Task task) { return submit(std::move(task), current); }

// From here on `id` comes after the mark.
inline void let_wait(const Mark& mark, int64_t id) {
  std::lock_guard guard(lock);
  for (auto& [other, at] : mark.seen) streams[id].seen[other] = std::max(streams[id].seen[other], at);
  submit([mark] { wait(mark); }, id);
}

// The host waits, and is counted.
inline void count(const std::string& way) {
  {
    std::lock_guard guard(lock);
    ++blocked[syscall(SYS_gettid)][way];
  }
  if (on_blocked) on_blocked(way);
}

inline void wait_on_host(const Mark& mark, const std::string& way, bool always = true) {
  if (always || !is_done(mark)) count(way);
  wait(mark);
  check();
}

inline void synchronize_all() {
  std::lock_guard guard(lock);
  for (auto& [id, stream] : streams) run_until(id, stream.given);
}

}  // namespace simulated
