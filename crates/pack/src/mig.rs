//! MIG instances that are made on demand: which memory slices of a card the next one takes.
//!
//! An instance of a profile takes slices that lie side by side, and starts only where the driver allows it. Of the
//! places that are free, it takes the one that leaves most sets of further instances possible. A weight of the sets by
//! the requested sizes does not place more of them: a test compares both. Of the profiles with the same memory it is
//! the one with most compute that may start there. This leaves the same sets possible, since slices of memory run out
//! first.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::rc::Rc;

use crate::Mib;

/// A card has so many memory slices at most.
pub const MAX_SLICES: u32 = 8;
/// Sizes of profiles that a geometry distinguishes; no card has more.
const SIZES: usize = 6;
/// Profiles that a geometry distinguishes, including profiles of one size with more compute.
const KINDS: usize = 2 * SIZES;
/// Kinds of cards whose tables a thread remembers.
const TABLES: usize = 16;

/// How an instance of one profile lies on a card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Profile {
    /// Memory slices.
    pub slices: u8,
    /// Compute slices.
    pub compute: u8,
    /// Memory of an instance.
    pub mib: u32,
    /// The slices at which one may start, one bit for each.
    pub starts: u8,
}

impl Profile {
    fn mask(self, start: u32) -> Option<u8> {
        let fits = self.slices > 0 && start + u32::from(self.slices) <= MAX_SLICES;
        let legal = fits && self.starts >> start & 1 == 1;
        legal.then(|| mask(start, self.slices.into()))
    }

    /// The places of an instance outside the slices `taken`: first slices and masks, in order.
    fn places(self, taken: u8) -> impl Iterator<Item = (u32, u8)> {
        let starts = 0..MAX_SLICES;
        let all = starts.filter_map(move |start| Some((start, self.mask(start)?)));
        all.filter(move |(_, mask)| mask & taken == 0)
    }
}

/// These slices as a mask; of more than a card can have, none.
#[must_use]
pub fn mask(start: u32, slices: u32) -> u8 {
    match start.saturating_add(slices) <= MAX_SLICES {
        true => (((1_u16 << slices) - 1) << start) as u8,
        false => 0,
    }
}

/// The profiles of a card, smallest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Of each size the one with least compute.
    profiles: [Profile; SIZES],
    /// All of them.
    kinds: [Profile; KINDS],
    /// Memory of one slice, in the profile that gets most of it.
    slice: Mib,
}

impl Geometry {
    /// The geometry of these profiles; none if no instance could ever be made.
    #[must_use]
    pub fn new(profiles: impl IntoIterator<Item = Profile>) -> Option<Self> {
        let usable = profiles.into_iter().filter(|profile| {
            profile.mib > 0 && (0..MAX_SLICES).any(|start| profile.mask(start).is_some())
        });
        let sorted: BTreeSet<Profile> = usable.collect();
        let mut known = [Profile::default(); SIZES];
        let mut kinds = [Profile::default(); KINDS];
        let mut count = 0;
        for (kind, profile) in sorted.into_iter().enumerate() {
            let is_new = count == 0 || known[count - 1].slices < profile.slices;
            if is_new && count < SIZES {
                known[count] = profile;
                count += 1;
            }
            if let Some(place) = kinds.get_mut(kind) {
                *place = profile;
            }
        }
        let mut geometry = Self {
            profiles: known,
            kinds,
            slice: Mib::ZERO,
        };
        let shares = geometry
            .profiles()
            .map(|profile| u64::from(profile.mib).div_ceil(profile.slices.into()));
        geometry.slice = Mib(shares.max()?);
        Some(geometry)
    }

    fn profiles(&self) -> impl Iterator<Item = Profile> {
        let all = self.profiles.into_iter();
        all.take_while(|profile| profile.slices > 0)
    }

    /// Every slice that an instance can have.
    #[must_use]
    pub fn all(&self) -> u8 {
        let masks = self.profiles().flat_map(|profile| profile.places(0));
        masks.fold(0, |all, (_, mask)| all | mask)
    }

    /// The smallest profile whose instances hold so much.
    #[must_use]
    pub fn profile(&self, mib: Mib) -> Option<Profile> {
        self.profiles()
            .find(|profile| u64::from(profile.mib) >= mib.0)
    }

    /// The profile with the same memory that has most compute and may start there.
    fn richest(&self, profile: Profile, start: u32) -> Profile {
        let same = |it: &&Profile| (it.slices, it.mib) == (profile.slices, profile.mib);
        let all = self.kinds.iter().filter(same);
        let all = all.filter(|it| it.mask(start).is_some());
        all.max_by_key(|it| it.compute).copied().unwrap_or(profile)
    }

    /// For each mask of slices in use, how many different sets of instances fit into the other slices.
    #[must_use]
    pub fn futures(&self) -> Vec<u32> {
        let mut sets: Vec<BTreeSet<[u8; SIZES]>> = vec![BTreeSet::new(); 256];
        for taken in (0..=u8::MAX).rev() {
            let mut own = BTreeSet::from([[0; SIZES]]);
            for (number, profile) in self.profiles().enumerate() {
                for (_, mask) in profile.places(taken) {
                    own.extend(sets[usize::from(taken | mask)].iter().map(|set| {
                        let mut set = *set;
                        set[number] += 1;
                        set
                    }));
                }
            }
            sets[usize::from(taken)] = own;
        }
        let count = |set: &BTreeSet<_>| u32::try_from(set.len()).unwrap_or(u32::MAX);
        sets.iter().map(count).collect()
    }

    /// [`Self::futures`], from a table that is made once.
    fn remembered(&self) -> Rc<[u32]> {
        thread_local! {
            static KNOWN: RefCell<Vec<(Geometry, Rc<[u32]>)>> = const { RefCell::new(Vec::new()) };
        }
        KNOWN.with_borrow_mut(|known| {
            if let Some((_, table)) = known.iter().find(|(geometry, _)| geometry == self) {
                return table.clone();
            }
            let table: Rc<[u32]> = self.futures().into();
            known.truncate(TABLES - 1);
            known.insert(0, (*self, table.clone()));
            table
        })
    }
}

/// Where an instance lies on its card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Piece {
    /// Its profile.
    pub profile: Profile,
    /// Its first memory slice.
    pub start: u8,
    /// How many sets of further instances it makes impossible.
    pub lost: u32,
}

impl Piece {
    /// Its slices.
    #[must_use]
    pub fn mask(&self) -> u8 {
        mask(self.start.into(), self.profile.slices.into())
    }
}

/// The memory slices of a card on which instances are made on demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slices {
    /// The profiles of possible instances.
    pub geometry: Geometry,
    /// Slices that no pod can have, even if all pods finish: slices of others' instances.
    pub blocked: u8,
    /// Slices that a new instance cannot have now, in addition to the blocked ones.
    pub taken: u8,
}

impl Slices {
    /// The slices that are not free.
    fn used(&self) -> u8 {
        self.blocked | self.taken
    }

    /// The place of an instance that holds `mib`. Most sets of further instances still fit there; then it gets most
    /// compute; then it is at the first slice.
    #[must_use]
    pub fn place(&self, mib: Mib) -> Option<Piece> {
        let profile = self.geometry.profile(mib)?;
        let used = self.used();
        let mut places = profile.places(used).peekable();
        places.peek()?;
        let futures = self.geometry.remembered();
        let of = |mask: u8| futures.get(usize::from(mask)).copied().unwrap_or(0);
        let pieces = places.map(|(start, mask)| Piece {
            profile: self.geometry.richest(profile, start),
            start: start as u8,
            lost: of(used).saturating_sub(of(used | mask)),
        });
        pieces.min_by_key(|piece| (piece.lost, Reverse(piece.profile.compute), piece.start))
    }

    /// Could an instance that holds so much be made now?
    pub(crate) fn may_hold(&self, mib: Mib) -> bool {
        let profile = self.geometry.profile(mib);
        profile.is_some_and(|profile| profile.places(self.used()).next().is_some())
    }

    /// The charge of a card for an instance of this profile: its share of the card's memory.
    #[must_use]
    pub fn charge(&self, profile: Profile) -> Mib {
        Mib(self.geometry.slice.0.saturating_mul(profile.slices.into()))
    }

    /// The memory of the card that pods may hold.
    #[must_use]
    pub fn capacity(&self) -> Mib {
        self.of(self.geometry.all() & !self.blocked)
    }

    /// The free memory of the card now, in one piece or in several.
    #[must_use]
    pub fn free(&self) -> Mib {
        self.of(self.geometry.all() & !self.used())
    }

    fn of(&self, mask: u8) -> Mib {
        Mib(self
            .geometry
            .slice
            .0
            .saturating_mul(mask.count_ones().into()))
    }

    /// The charge of the largest instance that could be made now.
    pub(crate) fn largest(&self) -> Mib {
        let used = self.used();
        let may = self.geometry.profiles();
        let may = may.filter(|profile| profile.places(used).next().is_some());
        may.map(|profile| self.charge(profile))
            .max()
            .unwrap_or_default()
    }

    /// The slices once pods have none of them.
    pub(crate) fn emptied(self) -> Self {
        Self { taken: 0, ..self }
    }
}
