#include "ep/tests/fake_device/fake_stream.h"

#include <utility>

#include "core/status.h"

namespace lowbit::ep::fake {

void Event::Set() {
  const std::lock_guard lock(mutex_);
  set_ = true;
  changed_.notify_all();
}

void Event::Wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return set_; });
}

Stream::Stream(std::chrono::microseconds delay) : delay_(delay), thread_([this] { Work(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Stream::Enqueue(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}

void Stream::Synchronize() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return tasks_.empty() && !running_; });
  if (!error_.empty()) throw Error(std::exchange(error_, ""));
}

void Stream::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ending_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    running_ = true;
    lock.unlock();
    if (delay_.count() > 0) std::this_thread::sleep_for(delay_);
    std::string error;
    try {
      task();
    } catch (const std::exception& e) {
      error = e.what();
    }
    lock.lock();
    if (error_.empty()) error_ = error;
    running_ = false;
    changed_.notify_all();
  }
}

}  // namespace lowbit::ep::fake
