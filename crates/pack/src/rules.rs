//! Which cards of a node a pod's own rules leave it: by model, by UUID, and by the pods that hold them.

use std::sync::Arc;

use crate::fit::fit_counting;
use crate::policy::FirstFit;
use crate::{Card, Choice, Mib, NodeGpus, Policy, Refusal, Request};

/// A pod's rules for the cards that it may get, beyond their memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rules {
    /// Patterns of models: one of them matches, unless there are none. `*` stands for any text.
    pub models: Vec<Box<str>>,
    /// Patterns of models of which none matches.
    pub not_models: Vec<Box<str>>,
    /// UUIDs of which the card has one, unless there are none.
    pub uuids: Vec<Box<str>>,
    /// UUIDs of which the card has none.
    pub not_uuids: Vec<Box<str>>,
    /// The group whose pods share their cards.
    pub affinity: Option<Arc<str>>,
    /// The group whose pods share no card.
    pub anti_affinity: Option<Arc<str>>,
}

/// The facts of a card that rules need, and a decision without rules does not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traits<'a> {
    /// Its UUID.
    pub uuid: &'a str,
    /// The name of its model.
    pub model: &'a str,
    /// The rules of the pods that hold memory of it.
    pub holders: Vec<&'a Rules>,
}

impl Rules {
    /// True if the rules leave every card.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Do model and UUID suit the pod?
    #[must_use]
    pub fn selects(&self, card: &Traits<'_>) -> bool {
        let has_model = |list: &[Box<str>]| list.iter().any(|it| matches(it, card.model));
        let is_in = |list: &[Box<str>]| list.iter().any(|uuid| **uuid == *card.uuid);
        (self.models.is_empty() || has_model(&self.models))
            && !has_model(&self.not_models)
            && (self.uuids.is_empty() || is_in(&self.uuids))
            && !is_in(&self.not_uuids)
    }

    /// Do the pods that hold the card suit the pod? `begun` means that a card of the node is the affinity group's.
    #[must_use]
    pub fn suits(&self, card: &Traits<'_>, begun: bool) -> bool {
        let apart = self.anti_affinity.is_none()
            || card
                .holders
                .iter()
                .all(|it| it.anti_affinity != self.anti_affinity);
        apart && (!begun || self.shares_with(card))
    }

    /// Does a pod of the affinity group hold the card?
    #[must_use]
    pub fn shares_with(&self, card: &Traits<'_>) -> bool {
        let group = self.affinity.as_ref();
        group.is_some() && card.holders.iter().any(|it| it.affinity.as_ref() == group)
    }
}

/// Does the pattern match the text? `*` stands for any text. Letters of both cases are equal, and so are blanks and
/// dashes.
fn matches(pattern: &str, text: &str) -> bool {
    let plain = |byte: u8| match byte {
        b' ' => b'-',
        byte => byte.to_ascii_lowercase(),
    };
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut at, mut of) = (0, 0);
    // Where to go on if the last `*` stands for one byte more.
    let mut retry = None;
    while at < text.len() {
        match pattern.get(of) {
            Some(b'*') => {
                of += 1;
                retry = Some((at, of));
            }
            Some(byte) if plain(*byte) == plain(text[at]) => {
                at += 1;
                of += 1;
            }
            _ => {
                let Some((from, then)) = retry else {
                    return false;
                };
                retry = Some((from + 1, then));
                (at, of) = (from + 1, then);
            }
        }
    }
    pattern[of..].iter().all(|byte| *byte == b'*')
}

/// [`fit_counting`] among the cards that the rules of `request` leave it; `traits` has one entry for each card of the node.
/// A card that they do not leave is as if it had no memory.
///
/// # Errors
/// As [`fit_counting`], and the refusals that are the rules' own.
pub fn fit_among(
    node: &NodeGpus,
    traits: &[Traits<'_>],
    request: &Request,
    policy: &dyn Policy,
    steps: &mut u64,
) -> Result<Choice, Refusal> {
    let Some(rules) = request.rules.as_deref() else {
        return fit_counting(node, request, policy, steps);
    };
    let begun = traits.iter().any(|card| rules.shares_with(card));
    let selected = left(node, traits, |card| rules.selects(card));
    let suited = left(&selected, traits, |card| rules.suits(card, begun));
    let refusal = match fit_counting(&suited, request, policy, steps) {
        Err(Refusal::TooComplex) => return Err(Refusal::TooComplex),
        Err(_) if suited != selected => match fit_counting(&selected, request, &FirstFit, steps) {
            Ok(_) => return Err(Refusal::Neighbours),
            Err(refusal) => refusal,
        },
        found => return found.or_else(|why| unselected(node, &selected, request, why, steps)),
    };
    unselected(node, &selected, request, refusal, steps)
}

/// The refusal, unless it is that the pod selects none of the cards that would do if they were empty.
fn unselected(
    node: &NodeGpus,
    selected: &NodeGpus,
    request: &Request,
    refusal: Refusal,
    steps: &mut u64,
) -> Result<Choice, Refusal> {
    let mut fits = |node: &NodeGpus| {
        let cards = node.cards.iter().map(|card| card.emptied()).collect();
        let empty = NodeGpus {
            cards,
            links: None,
            ..*node
        };
        fit_counting(&empty, request, &FirstFit, steps).is_ok()
    };
    Err(match selected != node && !fits(selected) && fits(node) {
        true => Refusal::Unselected,
        false => refusal,
    })
}

/// The node with nothing on the cards that `is_left` does not accept.
fn left(node: &NodeGpus, traits: &[Traits<'_>], is_left: impl Fn(&Traits<'_>) -> bool) -> NodeGpus {
    let mut node = node.clone();
    for (index, card) in node.cards.iter_mut().enumerate() {
        if !traits.get(index).is_some_and(&is_left) {
            *card = Card {
                capacity: Mib::ZERO,
                free: Mib::ZERO,
                limit: Mib::ZERO,
                usable: false,
                slices: None,
                ..*card
            };
        }
    }
    node
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_star_stands_for_any_text_and_a_blank_for_a_dash() {
        let h100 = "NVIDIA H100 80GB HBM3";
        for (pattern, text, is) in [
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("*h100*", h100, true),
            ("NVIDIA-H100-80GB-HBM3", h100, true),
            ("NVIDIA-H100", h100, false),
            ("*H1*0*HBM3", h100, true),
            ("*A100*", h100, false),
            ("a*b*c", "aXbYbZ", false),
            ("a*b*c", "aXbYbZc", true),
            ("**a", "bca", true),
        ] {
            assert_eq!(matches(pattern, text), is, "{pattern:?} {text:?}");
        }
    }
}
