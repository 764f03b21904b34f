//! Objects of the API server, each decoded by itself: one that cannot be read, stored by an older
//! schema for example, must not keep the others away.

use std::borrow::Cow;
use std::fmt::Debug;

use futures::stream::{BoxStream, StreamExt, TryStreamExt};
use kube::api::{Api, ObjectMeta};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Resource};
use serde::de::{Deserialize, DeserializeOwned, Deserializer};
use serde_json::Value;

use gpustow_api::{PodFacts, PodObject};

/// An object, or the remains of a broken one.
#[derive(Clone, Debug)]
pub(crate) enum Each<K> {
    /// As it should be.
    Whole(K),
    /// It does not match its type.
    Broken(Box<Remains>),
}

/// An object that cannot be decoded.
#[derive(Clone, Debug)]
pub(crate) struct Remains {
    /// Name, namespace, UID and resourceVersion.
    pub(crate) meta: ObjectMeta,
    /// All of it.
    pub(crate) value: Value,
    /// Which field is wrong, and how.
    pub(crate) error: String,
}

impl<K> Each<K> {
    /// The object, unless it is broken.
    pub(crate) fn whole(self) -> Option<K> {
        match self {
            Self::Whole(object) => Some(object),
            Self::Broken(_) => None,
        }
    }
}

impl Each<PodObject> {
    /// As [`PodObject::facts`]; for a broken pod, the facts in its remains.
    pub(crate) fn facts(&self, resource: &str) -> Option<PodFacts> {
        match self {
            Self::Whole(pod) => pod.facts(resource),
            Self::Broken(remains) => {
                PodFacts::from_remains(&remains.meta, &remains.value, &remains.error, resource)
            }
        }
    }
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Each<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        Ok(match serde_path_to_error::deserialize(&value) {
            Ok(object) => Self::Whole(object),
            Err(error) => {
                let error = format!("{}: {}", error.path(), error.inner());
                let text = |field: &str| Some(value["metadata"][field].as_str()?.to_owned());
                let meta = ObjectMeta {
                    name: text("name"),
                    namespace: text("namespace"),
                    uid: text("uid"),
                    resource_version: text("resourceVersion"),
                    ..ObjectMeta::default()
                };
                Self::Broken(Box::new(Remains { meta, value, error }))
            }
        })
    }
}

impl<K: Resource> Resource for Each<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(dt: &Self::DynamicType) -> Cow<'_, str> {
        K::kind(dt)
    }

    fn group(dt: &Self::DynamicType) -> Cow<'_, str> {
        K::group(dt)
    }

    fn version(dt: &Self::DynamicType) -> Cow<'_, str> {
        K::version(dt)
    }

    fn plural(dt: &Self::DynamicType) -> Cow<'_, str> {
        K::plural(dt)
    }

    fn meta(&self) -> &ObjectMeta {
        match self {
            Self::Whole(object) => object.meta(),
            Self::Broken(remains) => &remains.meta,
        }
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match self {
            Self::Whole(object) => object.meta_mut(),
            Self::Broken(remains) => &mut remains.meta,
        }
    }
}

/// Watches all objects of a kind. One by one they take three times as long to decode, so that this is
/// for `carefully`, once a whole answer could not be decoded.
pub(crate) fn watch<K>(
    client: Client,
    config: watcher::Config,
    carefully: bool,
) -> BoxStream<'static, Result<Event<Each<K>>, watcher::Error>>
where
    K: Resource<DynamicType: Default> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    if carefully {
        return watcher(Api::<Each<K>>::all(client), config).boxed();
    }
    let whole = watcher(Api::<K>::all(client), config).map_ok(|event| match event {
        Event::Apply(object) => Event::Apply(Each::Whole(object)),
        Event::Delete(object) => Event::Delete(Each::Whole(object)),
        Event::Init => Event::Init,
        Event::InitApply(object) => Event::InitApply(Each::Whole(object)),
        Event::InitDone => Event::InitDone,
    });
    whole.boxed()
}

/// Can an answer not be decoded, or is it another failure?
pub(crate) fn is_undecodable(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchFailed, WatchStartFailed};
    let (InitialListFailed(error) | WatchStartFailed(error) | WatchFailed(error)) = error else {
        return false;
    };
    matches!(error, kube::Error::SerdeError(_))
}
