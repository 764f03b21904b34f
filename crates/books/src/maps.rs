//! Maps and sets whose order of iteration depends only on their insertions and removals. Equal events lead to equal
//! decisions, and a replayed history shows its fault each time.
//!
//! Random numbers of the standard library seed the hash function: an outsider cannot predict which keys collide.

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

/// A map whose order depends only on its insertions and removals.
pub type HashMap<K, V> = indexmap::IndexMap<K, V, Hashing>;
/// A set whose order depends only on its insertions and removals.
pub type HashSet<T> = indexmap::IndexSet<T, Hashing>;
