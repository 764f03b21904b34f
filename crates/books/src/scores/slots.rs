//! The slots of nodes by name. The names are stored one after the other, so that looking up thousands
//! of them stays in the processor's cache.

use std::hash::BuildHasher as _;
use std::ops::Range;

use hashbrown::HashTable;

use crate::maps::Hashing;

/// A node's place in the tables.
pub type Slot = usize;

/// Bytes of names that are gone, beyond as many as are there, before the rest is moved together.
const WASTE: usize = 4096;

/// A map from name to slot.
#[derive(Debug, Default)]
pub(super) struct Slots {
    hasher: Hashing,
    table: HashTable<Entry>,
    text: String,
    /// Bytes of `text` whose names are gone.
    gone: usize,
}

#[derive(Debug)]
struct Entry {
    from: u32,
    to: u32,
    slot: u32,
}

impl Entry {
    fn range(&self) -> Range<usize> {
        self.from as usize..self.to as usize
    }

    /// Is this its name?
    fn is(&self, name: &str, text: &str) -> bool {
        text.as_bytes().get(self.range()) == Some(name.as_bytes())
    }
}

impl Slots {
    /// Where this node is.
    #[inline]
    pub(super) fn get(&self, name: &str) -> Option<Slot> {
        let is_it = |entry: &Entry| entry.is(name, &self.text);
        let entry = self.table.find(self.hasher.hash_one(name), is_it)?;
        Some(entry.slot as Slot)
    }

    /// Adds a name that is not there.
    pub(super) fn insert(&mut self, name: &str, slot: Slot) {
        let from = self.text.len();
        self.text.push_str(name);
        let at = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let entry = Entry {
            from: at(from),
            to: at(self.text.len()),
            slot: at(slot),
        };
        let hash = |entry: &Entry| self.hasher.hash_one(&self.text[entry.range()]);
        self.table.insert_unique(hash(&entry), entry, hash);
    }

    /// Takes a name out.
    pub(super) fn remove(&mut self, name: &str) -> Option<Slot> {
        let is_it = |entry: &Entry| entry.is(name, &self.text);
        let hash = self.hasher.hash_one(name);
        let (Entry { slot, .. }, _) = self.table.find_entry(hash, is_it).ok()?.remove();
        self.gone += name.len();
        if self.gone > self.text.len() / 2 + WASTE {
            let old = std::mem::take(self);
            for entry in &old.table {
                self.insert(&old.text[entry.range()], entry.slot as Slot);
            }
        }
        Some(slot as Slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_until_they_go_however_many_came_and_went() {
        let mut names = Slots::default();
        let name = |number: usize| format!("node-{number}");
        for number in 0..10_000 {
            names.insert(&name(number), number);
            let gone = number.checked_sub(10);
            assert_eq!(gone.and_then(|gone| names.remove(&name(gone))), gone);
            assert_eq!(
                names.get(&name(number / 2)),
                (number < 19).then_some(number / 2)
            );
            assert_eq!(names.get(&name(number)), Some(number));
        }
        assert!(names.text.len() < 3 * WASTE, "{}", names.text.len());
    }
}
