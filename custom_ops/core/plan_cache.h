// A bounded, locked cache: what a kernel derives from an input shape (tap offsets, tile counts) is computed
// once per shape, and a model that is fed ever new shapes does not grow.
#pragma once

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace lowbit {

// Keeps the `capacity` values used last. Keys are looked up by anything that they compare equal to and that a
// Key is made of.
template <typename Key, typename Value>
class PlanCache {
  using Entry = std::pair<Key, std::shared_ptr<const Value>>;

 public:
  explicit PlanCache(size_t capacity = 16) : capacity_(capacity) {}

  // The value for `key`, made by `make()` where it is not there. It stays alive while the caller holds it,
  // even when it is evicted meanwhile. `make` runs outside the lock, so two threads that meet a new shape at
  // once may both make it; one of the two equal values is kept.
  template <typename Sought, typename Make>
  std::shared_ptr<const Value> Get(const Sought& key, Make&& make) {
    if (std::shared_ptr<const Value> found = Find(key)) return found;
    std::shared_ptr<const Value> made = std::make_shared<const Value>(std::forward<Make>(make)());
    return Insert(key, std::move(made));
  }

  // Forgets the values for which `condition` holds.
  template <typename Condition>
  void DropIf(Condition&& condition) {
    std::vector<Entry> dropped;  // go after the lock, as in Insert
    const std::lock_guard lock(mutex_);
    const auto kept = std::stable_partition(entries_.begin(), entries_.end(),
                                            [&](const Entry& entry) { return !condition(*entry.second); });
    dropped.assign(std::make_move_iterator(kept), std::make_move_iterator(entries_.end()));
    entries_.erase(kept, entries_.end());
  }

 private:
  // Entries stand in the order of their last use, the newest first. Call with the lock held.
  template <typename Sought>
  std::shared_ptr<const Value> Touch(const Sought& key) {
    const auto it =
        std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.first == key; });
    if (it == entries_.end()) return nullptr;
    std::rotate(entries_.begin(), it, it + 1);
    return entries_.front().second;
  }

  template <typename Sought>
  std::shared_ptr<const Value> Find(const Sought& key) {
    const std::lock_guard lock(mutex_);
    return Touch(key);
  }

  template <typename Sought>
  std::shared_ptr<const Value> Insert(const Sought& key, std::shared_ptr<const Value> made) {
    std::shared_ptr<const Value> evicted;  // goes after the lock: it may have to wait for work on a device
    const std::lock_guard lock(mutex_);
    if (std::shared_ptr<const Value> found = Touch(key)) return found;
    if (entries_.size() == capacity_) {
      evicted = std::move(entries_.back().second);
      entries_.pop_back();
    }
    entries_.insert(entries_.begin(), {Key(key), made});
    return made;
  }

  const size_t capacity_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace lowbit
