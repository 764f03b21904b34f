//! `&Pod` → [`Request`]: the requests of the containers, and the settings for them in the annotations. This module does
//! not know nodes, cards, or free resources.

mod rules;
mod sum;

pub use crate::bad_request::MAX_MIB_PER_GPU;
pub use rules::MAX_LIST;
pub use sum::effective;

use std::collections::BTreeMap;

use gpustow_pack::{Bytes, Claim, ClaimKind, Mib, PolicyKind, Request};
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::bad_request::{BadRequest, annotation, field_of};
use crate::limit::{self, Asking, Size};
use crate::{Assignment, names, quantity};

/// The most GPUs that one container may ask for.
pub const MAX_GPUS: u32 = 64;
/// The longest name of an asking container: it is part of an annotation's name, whose length the
/// API server bounds.
pub const MAX_CONTAINER_NAME: usize = 63 - "container.".len();

/// The request of `pod` if `resource` is the name of gpu-mem, and the names of the requesting containers, one per
/// claim. A pod that does not request GPU memory gets a request without claims, whatever its annotations are.
///
/// ```
/// use gpustow_api::{names, request};
/// use gpustow_pack::Mib;
///
/// let pod = serde_json::from_value(serde_json::json!({
///     "metadata": { "annotations": { names::GPU_COUNT: "2" } },
///     "spec": { "containers": [
///         { "name": "main", "resources": { "limits": { names::GPU_MEM: "16384" } } },
///         { "name": "logs" },
///     ] },
/// }))?;
/// let (request, containers) = request(&pod, names::GPU_MEM)?;
/// assert_eq!((request.claims[0].gpus, request.claims[0].mib), (2, Mib(8192)));
/// assert_eq!(containers, ["main".into()]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`BadRequest`] names the invalid field, and the fix.
pub fn request(pod: &Pod, resource: &str) -> Result<(Request, Vec<Box<str>>), BadRequest> {
    let Some(spec) = &pod.spec else {
        return Ok(Default::default());
    };
    let mut asking = Vec::new();
    for (path, kind, container) in containers(spec) {
        if let Some(mib) = wish(container, resource, &path)? {
            let env = container.env.as_deref().unwrap_or_default();
            asking.push((path, kind, container.name.as_str(), mib, env));
        }
    }
    let mut request = Request {
        cpu_milli: sum::charged(pod, spec, "cpu", 1000),
        ram: Bytes(sum::charged(pod, spec, "memory", 1)),
        ..Request::default()
    };
    if asking.is_empty() {
        return Ok((request, Vec::new()));
    }
    let empty = BTreeMap::new();
    let annotations = pod.metadata.annotations.as_ref().unwrap_or(&empty);
    let gpus = annotation(annotations, names::GPU_COUNT, gpu_count)?.unwrap_or(1);
    request.exclusive = annotation(annotations, names::EXCLUSIVE, flag)?.unwrap_or(false);
    request.policy = annotation(annotations, names::POLICY, policy)?;
    let part = annotation(annotations, names::GPU_MEM_PERCENTAGE, percentage)?.unwrap_or(0);
    request.compute = annotation(annotations, names::COMPUTE_PERCENT, compute)?.unwrap_or(0);
    request.isolated = annotation(annotations, names::ISOLATION, isolation)?.is_some();
    request.alone = annotation(annotations, names::START, start)?.unwrap_or(false);
    request.rules = rules::of(annotations, pod.metadata.namespace.as_deref())?;
    let names = asking.iter().map(|(_, _, name, ..)| *name);
    only_of_asking(annotations, names.clone(), resource)?;
    let mut limited = Vec::new();
    for (path, kind, name, mib, env) in &asking {
        let own = format!("{}{name}", names::GPU_COUNT_OF);
        let gpus = annotation(annotations, &own, gpu_count)?.unwrap_or(gpus);
        let mib = Mib(split(*mib, gpus, path, resource)?);
        let own = format!("{}{name}", names::GPU_MEM_PERCENTAGE_OF);
        request.claims.push(Claim {
            percentage: annotation(annotations, &own, percentage)?.unwrap_or(part),
            ..Claim::new(*kind, gpus, mib)
        });
        limited.push(Asking {
            path,
            name,
            gpus,
            mib,
            env,
        });
    }
    // The containers of a pod that is only planned do not state their limits yet.
    let bound = spec.node_name.as_ref().is_some_and(|node| !node.is_empty());
    let waits = pod.metadata.resource_version.is_some() && !bound;
    let size = size(&request, spec)?;
    let limits = limit::of_driver(annotations, &limited, size, waits, resource)?;
    for (claim, limit) in request.claims.iter_mut().zip(limits) {
        claim.driver_limit = limit;
    }
    request.bursts = size == Size::Mib && limit::bursts(annotations, &limited);
    let gpus = request.claims.iter().map(|claim| claim.gpus);
    if !annotations.contains_key(names::ASSIGNMENT) {
        let fits = Assignment::fits_beside(annotations, names.clone().zip(gpus));
        fits.map_err(|problem| BadRequest {
            field: "metadata.annotations".to_owned(),
            problem,
        })?;
    }
    Ok((request, names.map(Box::from).collect()))
}

/// Refuses annotations for containers that do not ask.
fn only_of_asking<'a>(
    annotations: &BTreeMap<String, String>,
    asking: impl Iterator<Item = &'a str> + Clone,
    resource: &str,
) -> Result<(), BadRequest> {
    for key in annotations.keys() {
        let of = [
            names::GPU_COUNT_OF,
            names::GPU_MEM_PERCENTAGE_OF,
            names::MEM_LIMIT_OF,
        ];
        if let Some(container) = of.iter().find_map(|of| key.strip_prefix(of))
            && !asking.clone().any(|name| name == container)
        {
            return Err(BadRequest {
                field: field_of(key),
                problem: format!(
                    "no container {container:?} asks for {resource}: remove the annotation or \
                     name a container that asks"
                ),
            });
        }
    }
    Ok(())
}

/// How much of its GPUs the pod requests: one kind only.
fn size(request: &Request, spec: &PodSpec) -> Result<Size, BadRequest> {
    let is_relative = request.is_relative();
    if request.exclusive && (is_relative || request.compute > 0) {
        let problem = match is_relative {
            true => "a pod requests either whole GPUs or a percentage of them: remove one of them",
            false => {
                "a pod requests either whole GPUs or a share of their compute: remove one of them"
            }
        };
        return Err(BadRequest {
            field: field_of(names::EXCLUSIVE),
            problem: problem.to_owned(),
        });
    }
    if request.isolated {
        rules::may_be_isolated(request, spec)?;
        return Ok(Size::Instance);
    }
    Ok(match (request.exclusive, is_relative) {
        (true, _) => Size::Whole,
        (_, true) => Size::Part,
        _ if request.compute > 0 => Size::Shared,
        _ => Size::Mib,
    })
}

/// The containers with their paths: init containers first, both in the order of the pod.
fn containers(spec: &PodSpec) -> impl Iterator<Item = (String, ClaimKind, &Container)> {
    let init = spec
        .init_containers
        .iter()
        .flatten()
        .enumerate()
        .map(|(index, container)| {
            let kind = if is_sidecar(container) {
                ClaimKind::Sidecar
            } else {
                ClaimKind::Init
            };
            (format!("spec.initContainers[{index}]"), kind, container)
        });
    let main = spec
        .containers
        .iter()
        .enumerate()
        .map(|(index, container)| {
            (
                format!("spec.containers[{index}]"),
                ClaimKind::Main,
                container,
            )
        });
    init.chain(main)
}

fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// The MiB that `container` asks for, over all its GPUs; zero is not asking.
fn wish(container: &Container, resource: &str, path: &str) -> Result<Option<u64>, BadRequest> {
    let Some(asked) = limit(container, resource) else {
        return Ok(None);
    };
    let bad = |field: String, problem: String| Err(BadRequest { field, problem });
    let limits = format!("{path}.resources.limits");
    match quantity::whole(asked) {
        None => bad(
            format!("{limits}[{resource}]"),
            format!(
                "{:?} is not a whole number of MiB: write it like 8192",
                asked.0
            ),
        ),
        Some(0) => Ok(None),
        Some(_) if resource != names::NVIDIA_GPU && wants_whole_gpu(container) => bad(
            format!("{limits}[{}]", names::NVIDIA_GPU),
            format!("a container asks either for this or for {resource}: remove one of them"),
        ),
        Some(_) if container.name.len() > MAX_CONTAINER_NAME => bad(
            format!("{path}.name"),
            format!("longer than {MAX_CONTAINER_NAME} characters: shorten it"),
        ),
        Some(mib) => Ok(Some(mib)),
    }
}

fn wants_whole_gpu(container: &Container) -> bool {
    limit(container, names::NVIDIA_GPU).is_some_and(|asked| quantity::whole(asked) != Some(0))
}

fn limit<'a>(container: &'a Container, resource: &str) -> Option<&'a Quantity> {
    let resources = container.resources.as_ref()?;
    let of = |list: &'a Option<BTreeMap<String, Quantity>>| list.as_ref()?.get(resource);
    of(&resources.limits).or_else(|| of(&resources.requests))
}

/// The MiB on each of `gpus` cards.
fn split(mib: u64, gpus: u32, path: &str, resource: &str) -> Result<u64, BadRequest> {
    let gpus = u64::from(gpus);
    let problem = if mib / gpus > MAX_MIB_PER_GPU {
        let fix = if mib.is_multiple_of(1 << 20) {
            format!("the unit is MiB already, write {}", mib >> 20)
        } else {
            format!("write at most {}", gpus * MAX_MIB_PER_GPU)
        };
        format!("no GPU has {} MiB: {fix}", mib / gpus)
    } else if mib.is_multiple_of(gpus) {
        return Ok(mib / gpus);
    } else {
        let even = mib.div_ceil(gpus).saturating_mul(gpus);
        format!("{mib} MiB do not split evenly over {gpus} GPUs: ask for {even}")
    };
    Err(BadRequest {
        field: format!("{path}.resources.limits[{resource}]"),
        problem,
    })
}

fn gpu_count(value: &str) -> Result<u32, String> {
    let digits = value.bytes().all(|byte| byte.is_ascii_digit());
    match value.parse() {
        Ok(gpus @ 1..=MAX_GPUS) if digits => Ok(gpus),
        _ => Err(format!(
            "{value:?} is not a number of GPUs: write 1 to {MAX_GPUS}"
        )),
    }
}

fn percentage(value: &str) -> Result<u8, String> {
    let is_plain = value.bytes().all(|byte| byte.is_ascii_digit()) && !value.starts_with('0');
    match value.parse() {
        Ok(percentage @ 1..=100) if is_plain => Ok(percentage),
        _ => Err(format!(
            "{value:?} is not a percentage of a GPU: write 1 to 100"
        )),
    }
}

fn compute(value: &str) -> Result<u8, String> {
    percentage(value)
        .map_err(|_| format!("{value:?} is not a percentage of a GPU's compute: write 1 to 100"))
}

fn isolation(value: &str) -> Result<(), String> {
    match value {
        "mig" => Ok(()),
        _ => Err(format!("{value:?} is no kind of isolation: write mig")),
    }
}

fn flag(value: &str) -> Result<bool, String> {
    value
        .parse()
        .map_err(|_| format!("{value:?} is neither \"true\" nor \"false\""))
}

fn start(value: &str) -> Result<bool, String> {
    match value {
        "alone" => Ok(true),
        "beside" => Ok(false),
        _ => Err(format!(
            "{value:?} is no way to start: write alone, or beside"
        )),
    }
}

fn policy(value: &str) -> Result<PolicyKind, String> {
    value
        .parse()
        .map_err(|unknown: gpustow_pack::policy::UnknownPolicy| unknown.to_string())
}

/// `name`, if it is one by Kubernetes' rule for extended resources (`IsExtendedResourceName`) and its
/// form of names.
///
/// # Errors
/// The error in the name, and the fix.
pub fn extended_resource(name: &str) -> Result<String, &'static str> {
    let Some((prefix, rest)) = name.split_once('/') else {
        return Err("an extended resource has a prefix, as in example.com/gpu-mem");
    };
    if prefix.ends_with("kubernetes.io") || name.starts_with("requests.") {
        return Err("Kubernetes keeps it for itself: choose another name");
    }
    let is_plain = |part: &str, more: &str| {
        let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        let inner = |c: char| c.is_ascii_alphanumeric() || more.contains(c);
        ends(part.chars().next()) && ends(part.chars().last()) && part.chars().all(inner)
    };
    if is_plain(prefix, "-.") && is_plain(rest, "-._") && name.len() <= 253 {
        Ok(name.to_owned())
    } else {
        Err("write a domain, a slash, and letters, digits, dashes, dots or underscores")
    }
}

#[cfg(test)]
mod tests;
