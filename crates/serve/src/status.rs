//! Writes of a status of which nothing but the metadata is read back: the API server then encodes no whole object.

use std::fmt::Debug;

use axum::http::{Request, header};
use kube::api::{Patch, PatchParams};
use kube::core::Request as Requests;
use serde::Serialize;

const METADATA: header::HeaderValue = header::HeaderValue::from_static(
    "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
);

/// Patches the status of an object of the collection at `path`. The answer is a `PartialObjectMeta`.
///
/// # Errors
/// The request cannot be built.
pub fn status_patch<P: Serialize + Debug>(
    path: String,
    name: &str,
    params: &PatchParams,
    patch: &Patch<P>,
) -> kube::Result<Request<Vec<u8>>> {
    let mut request = Requests::new(path)
        .patch_subresource("status", name, params, patch)
        .map_err(kube::Error::BuildRequest)?;
    request.headers_mut().insert(header::ACCEPT, METADATA);
    Ok(request)
}
