//! The allowance of each container on its cards, in the units that frameworks take: MiB, and a share of the whole card.
//! An allowance informs the container and does not enforce anything. If the driver holds a container to a limit, the
//! program sees the limit as its card. The share then is a part of the limit, and excludes the memory that CUDA keeps
//! for itself.

use std::collections::BTreeMap;

use gpustow_pack::{Mib, Request};

use crate::limit::CONTEXT;
use crate::{Assignment, names};

/// Shares are whole numbers of these.
const PARTS: u64 = 10_000;

/// The annotations with the allowance of every container of `request`, whose names are `containers`. `size` returns, by
/// the UUID of a card, the memory that pods may hold of it, and all of its memory. Without this size, the annotations
/// do not have a share of the card.
#[must_use]
pub fn allowances(
    request: &Request,
    containers: &[Box<str>],
    assignment: &Assignment,
    size: impl Fn(&str) -> Option<(Mib, Mib)>,
) -> BTreeMap<String, String> {
    let mut told = BTreeMap::new();
    for (claim, name) in request.claims.iter().zip(containers) {
        let cards = assignment.containers.iter().find(|(it, _)| it == name);
        let cards = cards.map_or(&[][..], |(_, cards)| cards);
        if request.compute > 0 {
            let each = cards.iter().map(|card| {
                let mib = size(card).map_or(claim.mib, |(capacity, _)| claim.on(capacity));
                format!("{card}={}M", mib.0)
            });
            let each = each.collect::<Vec<_>>().join(",");
            told.insert(format!("{}{name}", names::MPS_OF), each);
        }
        let limit = claim.driver_limit;
        if limit > Mib::ZERO {
            let mib = limit.minus(CONTEXT);
            amount(&mut told, name, mib);
            let share =
                share(false, mib, limit).map(|it| (format!("{}{name}", names::SHARE_OF), it));
            told.extend(share);
            continue;
        }
        let charged = |uuid: &str| {
            let charge = assignment.charges.iter().find(|(it, _)| **it == *uuid);
            charge.map(|&(_, mib)| mib)
        };
        // The lowest amount, which is right on each of several different cards.
        let whole = cards.iter().filter_map(|card| charged(card)).min();
        let sizes: Option<Vec<(Mib, Mib)>> = cards.iter().map(|card| size(card)).collect();
        let part = sizes
            .iter()
            .flatten()
            .map(|(capacity, _)| claim.on(*capacity));
        let part = part.min().unwrap_or(claim.mib);
        let mib = whole.filter(|_| request.exclusive).unwrap_or(part);
        // The limit of MPS includes the memory that CUDA keeps for itself.
        let mib = match request.compute {
            0 => mib,
            _ => mib.minus(CONTEXT),
        };
        amount(&mut told, name, mib);
        let largest = sizes.filter(|_| !request.isolated);
        let largest = largest.and_then(|sizes| sizes.into_iter().map(|(_, total)| total).max());
        if let Some(share) = largest.and_then(|total| share(request.exclusive, mib, total)) {
            told.insert(format!("{}{name}", names::SHARE_OF), share);
        }
    }
    told
}

fn amount(told: &mut BTreeMap<String, String>, name: &str, mib: Mib) {
    told.insert(format!("{}{name}", names::MIB_OF), mib.0.to_string());
    told.insert(
        format!("{}{name}", names::BYTES_OF),
        mib.bytes().to_string(),
    );
}

/// Rounded down, so that a share never comes to more than the MiB.
fn share(exclusive: bool, mib: Mib, total: Mib) -> Option<String> {
    let parts = mib.0.saturating_mul(PARTS).checked_div(total.0)?;
    Some(match parts {
        PARTS.. => "1".to_owned(),
        _ if exclusive => "1".to_owned(),
        parts => format!("0.{parts:04}"),
    })
}

#[cfg(test)]
mod tests {
    use gpustow_pack::{Claim, ClaimKind};

    use super::*;

    fn told(mib: u64, exclusive: bool, cards: &[(&str, u64, u64)]) -> Vec<(String, String)> {
        let claim = Claim::new(ClaimKind::Main, cards.len() as u32, Mib(mib));
        let request = Request {
            claims: vec![claim],
            exclusive,
            ..Request::default()
        };
        let uuids = cards.iter().map(|&(uuid, ..)| uuid.into()).collect();
        let assignment = Assignment {
            charges: cards
                .iter()
                .map(|&(uuid, charge, _)| (uuid.into(), Mib(charge)))
                .collect(),
            containers: vec![("main".into(), uuids)],
            exclusive: Some(exclusive),
            compute: 0,
            instance: None,
        };
        let size = |uuid: &str| {
            let card = cards.iter().find(|card| card.0 == uuid);
            card.map(|&(.., total)| (Mib(total), Mib(total)))
                .filter(|(_, total)| *total > Mib::ZERO)
        };
        allowances(&request, &["main".into()], &assignment, size)
            .into_iter()
            .collect()
    }

    fn says(mib: &str, share: &str) -> Vec<(String, String)> {
        let bytes = Mib(mib.parse().unwrap_or_default()).bytes().to_string();
        let all = [
            ("bytes.gpustow.dev/main", bytes.as_str()),
            ("mib.gpustow.dev/main", mib),
            ("share.gpustow.dev/main", share),
        ];
        let all = all.into_iter().filter(|(_, value)| !value.is_empty());
        all.map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect()
    }

    #[test]
    fn a_share_is_rounded_down_and_right_on_every_card() {
        assert_eq!(
            told(8192, false, &[("a", 8192, 81_920)]),
            says("8192", "0.1000")
        );
        assert_eq!(
            told(8191, false, &[("a", 8191, 81_920)]),
            says("8191", "0.0999")
        );
        assert_eq!(told(1, false, &[("a", 1, 81_920)]), says("1", "0.0000"));
        assert_eq!(
            told(24_576, false, &[("a", 24_576, 24_576)]),
            says("24576", "1")
        );
        let unlike = [("a", 4096, 24_576), ("b", 4096, 81_920)];
        assert_eq!(told(4096, false, &unlike), says("4096", "0.0500"));
        // The charge includes the memory of another container.
        assert_eq!(
            told(1000, false, &[("a", 9000, 10_000)]),
            says("1000", "0.1000")
        );
        assert_eq!(told(1000, false, &[("a", 1000, 0)]), says("1000", ""));
    }

    #[test]
    fn of_a_limit_that_the_driver_holds_the_share_is_of_the_limit_less_a_context() {
        let mut claims = [8192, 4096].map(|mib| Claim::new(ClaimKind::Main, 1, Mib(mib)));
        claims[0].driver_limit = Mib(16_384);
        let names: [Box<str>; 2] = ["burst".into(), "rest".into()];
        let request = Request {
            claims: claims.to_vec(),
            ..Request::default()
        };
        let assignment = Assignment {
            charges: vec![("a".into(), Mib(12_288))],
            containers: names
                .iter()
                .map(|name| (name.clone(), vec!["a".into()]))
                .collect(),
            exclusive: Some(false),
            compute: 0,
            instance: None,
        };
        let told = allowances(&request, &names, &assignment, |_| {
            Some((Mib(81_000), Mib(81_920)))
        });
        let told: Vec<_> = told.values().skip(2).map(String::as_str).collect();
        assert_eq!(told, ["15552", "4096", "0.9492", "0.0500"]);
    }

    #[test]
    fn client_of_mps_is_told_its_memory_of_each_gpu_and_may_use_that_less_a_context() {
        let request = Request {
            claims: vec![Claim {
                percentage: 25,
                ..Claim::new(ClaimKind::Main, 2, Mib(4096))
            }],
            compute: 30,
            ..Request::default()
        };
        let cards = vec!["a".into(), "b".into()];
        let assignment = Assignment {
            charges: vec![("a".into(), Mib(10_000)), ("b".into(), Mib(20_000))],
            containers: vec![("main".into(), cards)],
            exclusive: Some(false),
            compute: 30,
            instance: None,
        };
        let told = allowances(&request, &["main".into()], &assignment, |card| {
            let mib = if card == "a" { 40_000 } else { 80_000 };
            Some((Mib(mib), Mib(mib)))
        });
        let told: Vec<_> = told.iter().map(|(key, it)| (&**key, &**it)).collect();
        let expected = [
            ("bytes.gpustow.dev/main", "9613344768"),
            ("mib.gpustow.dev/main", "9168"),
            ("mps.gpustow.dev/main", "a=10000M,b=20000M"),
            ("share.gpustow.dev/main", "0.1146"),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn who_has_a_whole_card_is_told_all_of_it() {
        assert_eq!(told(1, true, &[("a", 80_000, 81_920)]), says("80000", "1"));
        let two = [("a", 80_000, 81_920), ("b", 40_000, 40_960)];
        assert_eq!(told(1, true, &two), says("40000", "1"));
    }
}
