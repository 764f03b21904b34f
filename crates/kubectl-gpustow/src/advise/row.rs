//! The advice for one container, and the objections to it.

use std::collections::BTreeMap;

use gpustow_advice::Advice;
use gpustow_api::workload::{Basis, ContainerHistory};
use gpustow_pack::Mib;

use super::{Key, Live, NO_PROCESS, Row, UNREADABLE, patch};

/// The row of a container, from its pods and from the histories of all its images.
pub(super) fn row(
    key: Key,
    resource: &str,
    live: &Live,
    mut histories: Vec<ContainerHistory>,
    permille: Option<u32>,
) -> Row {
    // The image of most pods, else the one that ran last.
    let common = live.images.iter().max_by_key(|(_, pods)| **pods);
    histories.sort_by_key(|it| it.history.last);
    let image = common.map(|(image, _)| image);
    let image = image.or_else(|| Some(&histories.last()?.image));
    let basis = Basis::new(&histories, image.map_or("", |it| it));
    let sizes = basis.histories.iter().map(|it| it.gpu_mib);
    let requested = match (live.whole_gpus, sizes.max()) {
        (0, _) => live.requested,
        (gpus, size) => size.map(|it| (Mib(it), gpus)),
    };
    let (each, gpus) = requested.unwrap_or((Mib::ZERO, live.whole_gpus.max(1)));
    let whole = |mib: Mib| Mib(mib.0.saturating_mul(gpus));
    let advice = basis.advise(permille);
    let (mut notes, holds) = notes(live, &basis, advice.as_ref(), permille);
    let request = advice.as_ref().map(|it| it.request);
    if requested.is_some() && request.is_some_and(|it| it > each) {
        notes.push("uses more than it requests".to_owned());
    }
    let frees = request.filter(|it| holds && live.pods > 0 && *it < each);
    let frees = frees.map(|it| Mib(whole(each.minus(it)).0.saturating_mul(live.pods)));
    let patch = advice.as_ref().filter(|_| holds).and_then(|it| {
        patch::of(
            &key.workload,
            resource,
            &key.container,
            whole(it.request),
            whole(it.limit),
            live.whole_gpus,
        )
    });
    Row {
        pods: live.pods,
        gpus,
        requested: requested.map(|(mib, _)| whole(mib)),
        peak: basis
            .histories
            .iter()
            .map(|it| whole(Mib(it.history.peak_mib)))
            .max(),
        limit: advice.as_ref().map(|it| whole(it.limit)),
        samples: advice.as_ref().map_or(0, |it| it.samples),
        seconds: advice.as_ref().map_or(0, |it| it.spans),
        request,
        frees,
        empty_gpus: None,
        patch,
        notes,
        key: Some(key),
    }
}

/// The objections to the advice, and whether the advice holds nevertheless.
fn notes(
    live: &Live,
    basis: &Basis<'_>,
    advice: Option<&Advice>,
    permille: Option<u32>,
) -> (Vec<String>, bool) {
    let mut notes = live.notes.clone();
    let mut note = |note: String| {
        if !notes.contains(&note) {
            notes.push(note);
        }
    };
    let cautions = advice.iter().flat_map(|it| &it.cautions);
    let stops = cautions.clone().any(|it| it.stops()) || basis.against().is_some();
    let unseen = |it: &String| [UNREADABLE, NO_PROCESS].contains(&&**it);
    let holds = !live.exclusive && live.notes.iter().all(unseen) && !stops;
    basis.against().iter().for_each(|it| note(it.to_string()));
    cautions.for_each(|it| note(it.to_string()));
    if advice.is_none() {
        note("no history yet".to_owned());
    }
    if basis.earlier {
        note("advised by an earlier image: this one has too little history".to_owned());
    }
    unequal(basis, permille).into_iter().for_each(&mut note);
    if live.exclusive {
        note("requests whole GPUs".to_owned());
    }
    (notes, holds)
}

/// The need on GPUs of each size, if the needs differ.
fn unequal(basis: &Basis<'_>, permille: Option<u32>) -> Option<String> {
    let needs = basis.histories.iter().filter_map(|it| {
        let needed = it.advise(permille)?.request;
        Some((Mib(it.gpu_mib), needed))
    });
    let needs: BTreeMap<Mib, Mib> = needs.collect();
    let (most, least) = (needs.values().max()?, needs.values().min()?);
    let each = needs
        .iter()
        .map(|(gpu, needed)| format!("{needed} of {gpu}"));
    let each: Vec<_> = each.collect();
    (needs.len() > 1 && most.0 * 10 > least.0 * 11).then(|| format!("needs {}", each.join(" and ")))
}
