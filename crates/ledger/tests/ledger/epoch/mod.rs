//! The specification of how one extender relieves another (`src/epoch.rs`), searched for a card that is given away
//! twice. It stands next to the ledger's own model, because both run optimised.

mod protocol;
mod search;

use protocol::{Action, Protocol, World};
use search::{Found, search};

/// As it is.
const NOW: Protocol = Protocol {
    fresh_mark: true,
    hold_back: true,
    tell_tenures: true,
    clean_if_fenced: true,
};

/// As it was when the fence wrote the bare number of the epoch.
const BEFORE: Protocol = Protocol {
    fresh_mark: false,
    hold_back: false,
    tell_tenures: false,
    clean_if_fenced: false,
};

/// Nothing happens but takeovers.
const QUIET: World = World {
    protocol: NOW,
    swaps: 3,
    deletions: 0,
    crashes: 0,
    failures: 0,
    touches: 0,
    namesakes: false,
};

/// Any two mishaps in addition to three takeovers.
fn worlds() -> [World; 4] {
    let world = |deletions, crashes, failures, touches| World {
        deletions,
        crashes,
        failures,
        touches,
        ..QUIET
    };
    [
        world(1, 0, 1, 0),
        world(1, 1, 0, 0),
        world(0, 1, 1, 0),
        world(0, 0, 1, 1),
    ]
}

fn look(world: World) -> Found<Action> {
    let found = search(&world);
    println!("{} states, {} steps deep", found.states, found.depth);
    found
}

/// A way to a card that is given away twice.
fn over_commits(world: World) -> Vec<Action> {
    let way = look(world).wrong;
    assert!(way.is_some(), "no way to an over-committed card");
    way.unwrap_or_default()
}

#[test]
fn no_takeover_gives_a_card_away_twice() {
    for world in worlds() {
        assert_eq!(look(world).wrong, None);
    }
}

#[test]
fn nor_do_extenders_that_bear_one_name() {
    let namesakes = World {
        namesakes: true,
        ..worlds()[0]
    };
    assert_eq!(look(namesakes).wrong, None);
}

#[test]
fn the_bare_number_of_the_epoch_did_when_the_lease_was_deleted() {
    let undeleted = World {
        protocol: BEFORE,
        crashes: 1,
        ..QUIET
    };
    assert_eq!(look(undeleted).wrong, None);
    let deleted = World {
        deletions: 1,
        ..undeleted
    };
    let way = over_commits(deleted);
    assert!(way.contains(&Action::DeleteLease), "{way:?}");
}

#[test]
fn each_part_of_the_protocol_is_needed() {
    let failing = |protocol| World {
        protocol,
        failures: 1,
        ..QUIET
    };
    let deleted = |protocol| World {
        protocol,
        deletions: 1,
        ..QUIET
    };
    over_commits(deleted(Protocol {
        fresh_mark: false,
        hold_back: false,
        ..NOW
    }));
    over_commits(failing(Protocol {
        hold_back: false,
        ..NOW
    }));
    over_commits(failing(Protocol {
        clean_if_fenced: false,
        ..NOW
    }));
    over_commits(World {
        namesakes: true,
        ..deleted(Protocol {
            tell_tenures: false,
            ..NOW
        })
    });
}
