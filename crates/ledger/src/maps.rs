//! Maps and how they hash: from where the standard library's random numbers say, so that in a world whose dice are
//! thrown by a seed the same happens again, while nobody outside can tell which keys collide.

use std::hash::{BuildHasher, RandomState};

use foldhash::fast::{FixedState, FoldHasher};

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Hashing(FixedState);

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

pub(crate) type HashMap<K, V> = hashbrown::HashMap<K, V, Hashing>;
pub(crate) type HashSet<T> = hashbrown::HashSet<T, Hashing>;
