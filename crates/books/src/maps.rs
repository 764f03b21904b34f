//! Maps that are iterated in an order which follows from what was put into them and taken out: the same events lead to
//! the same decisions, and a fault that a history shows is shown each time.
//!
//! They hash from where the standard library's random numbers say: no outsider can tell which keys collide.

use std::hash::{BuildHasher, RandomState};

use foldhash::fast::{FixedState, FoldHasher};

/// See the module.
#[derive(Clone, Debug)]
pub struct Hashing(FixedState);

impl Default for Hashing {
    fn default() -> Self {
        let seed = RandomState::new().hash_one(());
        Self(FixedState::with_seed(seed))
    }
}

impl BuildHasher for Hashing {
    type Hasher = FoldHasher<'static>;

    fn build_hasher(&self) -> Self::Hasher {
        self.0.build_hasher()
    }
}

/// A map in the order of what was put into it.
pub type HashMap<K, V> = indexmap::IndexMap<K, V, Hashing>;
/// A set in the order of what was put into it.
pub type HashSet<T> = indexmap::IndexSet<T, Hashing>;
