//! Physical cards and the node that holds them, as a decision sees them.

use std::fmt;
use std::iter::Sum;
use std::ops::Add;
use std::sync::Arc;

use crate::mig::Slices;
use crate::{Links, Request};

/// An amount of GPU memory in whole MiB (2²⁰ bytes). Arithmetic saturates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mib(pub u64);

impl Mib {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// The rest after `other` is taken away, at least zero.
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The amount in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.0.saturating_mul(1 << 20)
    }
}

impl Add for Mib {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sum for Mib {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Mib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.0)
    }
}

/// An amount of host memory in bytes, the unit in which kube-scheduler adds. Arithmetic saturates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// The rest after `other` is taken away, at least zero.
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The whole MiB in it.
    #[must_use]
    pub fn whole_mib(self) -> Mib {
        Mib(self.0 >> 20)
    }

    /// The MiB that hold it.
    #[must_use]
    pub fn mib_rounded_up(self) -> Mib {
        Mib(self.0.div_ceil(1 << 20))
    }
}

impl From<Mib> for Bytes {
    fn from(amount: Mib) -> Self {
        Self(amount.bytes())
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Add::add)
    }
}

/// A card's model as a small number; the caller keeps the names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId(pub u16);

/// One physical GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Card {
    /// The memory that pods may hold in all: total − reserved by the driver − headroom.
    pub capacity: Mib,
    /// The memory that a new pod may take now.
    pub free: Mib,
    /// The card's model.
    pub model: ModelId,
    /// False while the card must not get new pods (unhealthy, held by another component).
    pub usable: bool,
    /// The highest limit that the driver would hold a container to here; zero if it holds none.
    pub limit: Mib,
    /// How much of it is in use, where that matters in addition to the promised memory.
    pub lending: Lending,
    /// Its compute, if pods share that by shares.
    pub compute: Compute,
    /// Its memory slices, if MIG instances are made on it on demand. Such a card takes only pods that ask for an instance.
    pub slices: Option<Slices>,
    /// The pods that start on it.
    pub starts: Starts,
}

/// Which pods start on a card: they measure its free memory, perhaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Starts {
    /// None: any pod may start there.
    #[default]
    None,
    /// Pods with which others may start, except a pod that starts alone.
    Beside,
    /// One that starts alone: no other pod may.
    Alone,
}

impl Starts {
    /// A pod that starts alone, or together with others.
    #[must_use]
    pub fn of(alone: bool) -> Self {
        match alone {
            true => Self::Alone,
            false => Self::Beside,
        }
    }

    /// May a pod come, which starts alone or not?
    pub(crate) fn take(self, alone: bool) -> bool {
        match self {
            Self::None => true,
            Self::Beside => !alone,
            Self::Alone => false,
        }
    }
}

/// Compute of a card that its pods share, in hundredths of the card. Zero on a card whose pods do not share it: such a
/// card gets only pods without a request for compute. Any other card gets only pods with such a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Compute {
    /// The hundredths that pods may hold in all.
    pub capacity: u16,
    /// The hundredths that a new pod may take now.
    pub free: u16,
}

/// The pods' use of a card's memory, in sixteenths of its capacity, so coarse that frequent changes seldom change this.
/// Zero where no memory is lent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Lending {
    /// Likely to be in use.
    pub used: u8,
    /// In use beyond the promise to the pods that use it.
    pub lent: u8,
}

impl Card {
    /// The card as it would be if it were empty and took pods.
    #[must_use]
    pub fn emptied(self) -> Self {
        Self {
            free: self.capacity,
            usable: true,
            lending: Lending::default(),
            compute: self.compute.emptied(),
            slices: self.slices.map(Slices::emptied),
            starts: Starts::None,
            ..self
        }
    }

    /// The card once a pod of this request is charged so much on it.
    pub fn take(&mut self, request: &Request, charge: Mib) {
        self.free = self.free.minus(charge);
        if let Some(slices) = &mut self.slices {
            let piece = request.hardest().and_then(|claim| slices.place(claim.mib));
            slices.taken |= piece.map_or(0, |piece| piece.mask());
        }
        self.compute.free = self.compute.free.saturating_sub(request.compute.into());
    }

    /// Is the other card equal, apart from the pods' use of its memory?
    pub(crate) fn is_alike(&self, other: &Self) -> bool {
        let lending = self.lending;
        *self == Self { lending, ..*other }
    }

    /// All of it may be taken.
    pub(crate) fn is_whole(&self) -> bool {
        self.usable && self.free == self.capacity
    }
}

impl Compute {
    /// May a pod that asks for so much of it have that now?
    pub(crate) fn has(self, asked: u8) -> bool {
        (asked == 0) == (self.capacity == 0) && u16::from(asked) <= self.free
    }

    fn emptied(self) -> Self {
        Self {
            free: self.capacity,
            ..self
        }
    }

    /// The compute of a card that suits a pod with this request for compute, and no other pod.
    pub(crate) fn suiting(asked: u8) -> Self {
        Self {
            capacity: asked.into(),
            free: asked.into(),
        }
    }
}

/// The cards of one node and the free part of its other resources.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct NodeGpus {
    /// Cards in NVML index order.
    pub cards: Vec<Card>,
    /// Free CPU in thousandths of a core.
    pub cpu_free_milli: u64,
    /// Free host memory. A policy counts whole MiB of it.
    pub ram_free: Bytes,
    /// How close the cards are to each other; none if that is unknown.
    pub links: Option<Arc<Links>>,
}

impl NodeGpus {
    /// Takes the resources of a pod with this request: these charges of cards, CPU and host memory.
    pub fn take(&mut self, request: &Request, charges: &[(usize, Mib)]) {
        for &(card, mib) in charges {
            if let Some(card) = self.cards.get_mut(card) {
                card.take(request, mib);
            }
        }
        self.cpu_free_milli = self.cpu_free_milli.saturating_sub(request.cpu_milli);
        self.ram_free = self.ram_free.minus(request.ram);
    }

    /// True if a policy counts all of its free host memory.
    #[must_use]
    pub fn is_in_mib(&self) -> bool {
        self.ram_free == self.ram_free.whole_mib().into()
    }

    /// The node as every policy sees it. Nodes of one make differ by a few KiB of host memory; seen
    /// like this they are equal.
    #[must_use]
    pub fn in_mib(&self) -> Self {
        Self {
            ram_free: self.ram_free.whole_mib().into(),
            ..self.clone()
        }
    }

    /// Do pods start on one of its cards?
    #[must_use]
    pub fn has_starts(&self) -> bool {
        self.cards.iter().any(|card| card.starts > Starts::None)
    }

    /// The largest piece of free memory on a usable card.
    #[must_use]
    pub fn largest(&self) -> Mib {
        let cards = self.cards.iter().filter(|card| card.usable);
        cards.map(|card| card.free).max().unwrap_or_default()
    }

    /// Free GPU memory over all usable cards.
    #[must_use]
    pub fn free(&self) -> Mib {
        self.cards
            .iter()
            .filter(|card| card.usable)
            .map(|card| card.free)
            .sum()
    }
}
