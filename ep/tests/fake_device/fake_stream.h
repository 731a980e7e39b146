// A stream that really runs behind the host's back: a thread that takes its time before every task.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace lowbit::ep::fake {

// Something that happens once.
class Event {
 public:
  void Set();
  void Wait();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

class Stream {
 public:
  explicit Stream(std::chrono::microseconds delay);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void Enqueue(std::function<void()> task);
  // Returns when all is done; throws the first error that a task has thrown.
  void Synchronize();

 private:
  void Work();

  const std::chrono::microseconds delay_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool running_ = false, ending_ = false;
  std::string error_;
  std::thread thread_;
};

}  // namespace lowbit::ep::fake
