//! Quotas and LimitRanges of another sharer's resources, in namespaces whose pods are translated.

use gpustow_admission::adopt::Terms;
use gpustow_api::quantity;
use gpustow_inspect::Bounds;
use k8s_openapi::api::core::v1::{LimitRange, LimitRangeItem, ResourceQuota};
use kube::ResourceExt;

/// A quota or LimitRange of a resource that pods request no more once they are translated.
pub(crate) struct Stale {
    /// `resourcequota/namespace/name`.
    pub(crate) object: String,
    pub(crate) namespace: String,
    /// Its entries for the resource.
    pub(crate) says: String,
    /// The quota that holds as much.
    pub(crate) becomes: Option<String>,
    pub(crate) problem: &'static str,
    pub(crate) fix: String,
}

/// The ineffective quotas and LimitRanges of namespaces with terms.
pub(crate) fn stale(
    bounds: &Bounds,
    terms: impl Fn(&str) -> Option<Terms>,
    resource: &str,
) -> Vec<Stale> {
    let new = format!("requests.{resource}");
    let all = bounds.quotas.iter();
    let counted: Vec<_> = all
        .filter(|it| hard(it).any(|(key, _)| *key == new))
        .collect();
    let is_counted = |of: &str| {
        counted
            .iter()
            .any(|it| it.namespace().as_deref() == Some(of))
    };
    let quotas = bounds.quotas.iter().filter_map(|quota| {
        let (object, namespace) = place("resourcequota", quota);
        let terms = terms(&namespace).filter(|_| !is_counted(&namespace))?;
        let old = hard(quota).filter_map(|(key, units)| {
            let plain = key.strip_prefix("requests.").unwrap_or(key);
            // An amount of memory is more exact than a number of GPUs.
            let mib = terms.bound(plain, units)?;
            Some((plain.contains("mem"), mib, format!("{key} {units}")))
        });
        let old: Vec<_> = old.collect();
        let (_, mib, _) = old.iter().max()?;
        let becomes = format!("{new} {mib}");
        let says: Vec<_> = old.iter().map(|(.., said)| said.as_str()).collect();
        Some(Stale {
            object,
            namespace,
            says: says.join(", "),
            problem: "it counts no pod that gpustow translates",
            fix: format!("write a quota of {becomes}: docs/migrate.md"),
            becomes: Some(becomes),
        })
    });
    let ranges = bounds.ranges.iter().filter_map(|range| {
        let (object, namespace) = place("limitrange", range);
        let terms = terms(&namespace)?;
        let lists = items(range).flat_map(|it| [&it.max, &it.default, &it.default_request, &it.min]);
        let mut keys = lists.flatten().flat_map(|list| list.keys());
        let key = keys.find(|key| terms.bound(key, 1).is_some())?;
        Some(Stale {
            object,
            namespace,
            says: key.clone(),
            becomes: None,
            problem: "it has pods that gpustow translates refused, because it gives the old resource again",
            fix: format!("remove {key} from it"),
        })
    });
    quotas.chain(ranges).collect()
}

/// The GPU memory that LimitRanges give to each container without a request for it. An entry has the object, the
/// amount, and whether the amount is also the maximum of a container. Kubernetes gives the maximum if there is no
/// default.
pub(crate) fn given(bounds: &Bounds, resource: &str) -> Vec<(String, u64, bool)> {
    let given = bounds.ranges.iter().filter_map(|range| {
        let mut items = items(range).filter(|item| item.type_ == "Container");
        let (mib, is_most) = items.find_map(|item| {
            let amount = |list: Option<_>| quantity::whole(list?);
            let most = amount(item.max.as_ref().and_then(|it| it.get(resource)));
            let said = amount(item.default.as_ref().and_then(|it| it.get(resource)));
            let mib = said.or(most).filter(|mib| *mib > 0)?;
            Some((mib, most == Some(mib)))
        })?;
        Some((place("limitrange", range).0, mib, is_most))
    });
    given.collect()
}

fn hard(quota: &ResourceQuota) -> impl Iterator<Item = (&String, u64)> {
    let hard = quota.spec.iter().flat_map(|spec| &spec.hard).flatten();
    hard.filter_map(|(key, amount)| Some((key, quantity::whole(amount)?)))
}

fn items(range: &LimitRange) -> impl Iterator<Item = &LimitRangeItem> {
    range.spec.iter().flat_map(|spec| &spec.limits)
}

fn place(kind: &str, object: &impl ResourceExt) -> (String, String) {
    let namespace = object.namespace().unwrap_or_default();
    let name = object.name_any();
    (format!("{kind}/{namespace}/{name}"), namespace)
}
