//! Why a gang is not placed, in numbers.

use std::fmt;

use gpustow_api::Group;

/// How many pods of a group fit at the same time, and how many must.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// The group.
    pub group: Group,
    /// The number of pods that fit, including bound pods.
    pub fit: usize,
    /// The number of pods that must fit.
    pub of: usize,
    /// How far the search for their nodes went.
    pub search: Extent,
}

/// How far a search went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// To its end.
    Whole,
    /// As far as one may go: more pods may fit.
    Part,
    /// Nowhere: more pods must be placed at the same time than one looks for.
    TooMany,
}

/// Pods of a gang that are placed at the same time at most.
pub const MOST_PODS: usize = 2048;

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            group,
            fit,
            of,
            search,
        } = self;
        match search {
            Extent::TooMany => {
                write!(
                    f,
                    "group {group}: of {of} pods, {MOST_PODS} at most can fit"
                )
            }
            Extent::Part => write!(
                f,
                "group {group}: the search ended with {fit} of {of} that fit"
            ),
            Extent::Whole if fit < of => write!(f, "group {group}: {fit} of {of} fit"),
            Extent::Whole => write!(f, "group {group}: its other pods need the room"),
        }
    }
}
