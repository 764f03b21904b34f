//! How many earmarks there are, and how those before them ended.

use gpustow_books::{Cause, Ended};
use strum::VariantArray as _;

use crate::Ledger;

impl Ledger {
    /// How many earmarks there are now, for each cause.
    pub fn earmarks(&self) -> impl Iterator<Item = (Cause, usize)> {
        let all = Cause::EARMARKS.into_iter();
        all.map(|cause| (cause, self.parts.earmarks.all_of(cause).len()))
    }

    /// How many ended since this ledger began, for each cause and each way.
    pub fn earmarks_ended(&self) -> impl Iterator<Item = (Cause, Ended, u64)> {
        Cause::EARMARKS.into_iter().flat_map(move |cause| {
            let all = Ended::VARIANTS.iter();
            all.map(move |how| (cause, *how, self.parts.earmarks.count_ended(cause, *how)))
        })
    }
}
