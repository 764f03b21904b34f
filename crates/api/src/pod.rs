//! A Pod with a field of later versions of Kubernetes, which the client library's type leaves out, and without its managed
//! fields, which nothing here uses.

use std::fmt;
use std::ops::Deref;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::{
    self, DeserializeSeed, Deserializer, IgnoredAny, IntoDeserializer as _, MapAccess, Visitor,
};
use serde_json::Value;

use crate::{Group, PodFacts};

/// A Pod as the API server and kube-scheduler send it, without `metadata.managedFields`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodObject {
    /// The fields that the client library knows.
    pub pod: Pod,
    /// `spec.schedulingGroup.podGroupName`, which is there from Kubernetes 1.36 on.
    pub pod_group: Option<Box<str>>,
}

impl PodObject {
    /// As [`PodFacts::from_pod`]. The PodGroup wins over labels that name a group.
    #[must_use]
    pub fn facts(&self, resource: &str) -> Option<PodFacts> {
        let mut facts = PodFacts::from_pod(&self.pod, resource)?;
        facts.join(self.pod_group.as_deref());
        Some(facts)
    }
}

impl PodFacts {
    /// The pod is in that PodGroup of its namespace, if in any.
    pub(crate) fn join(&mut self, pod_group: Option<&str>) {
        if let Some(name) = pod_group {
            self.group = Some(Group::in_tree(&self.namespace, name));
        }
    }
}

impl Deref for PodObject {
    type Target = Pod;

    fn deref(&self) -> &Pod {
        &self.pod
    }
}

impl From<Pod> for PodObject {
    fn from(pod: Pod) -> Self {
        Self {
            pod,
            pod_group: None,
        }
    }
}

impl k8s_openapi::Resource for PodObject {
    const API_VERSION: &'static str = Pod::API_VERSION;
    const GROUP: &'static str = Pod::GROUP;
    const KIND: &'static str = Pod::KIND;
    const VERSION: &'static str = Pod::VERSION;
    const URL_PATH_SEGMENT: &'static str = Pod::URL_PATH_SEGMENT;
    type Scope = <Pod as k8s_openapi::Resource>::Scope;
}

impl k8s_openapi::Metadata for PodObject {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.pod.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.pod.metadata
    }
}

/// The name of its PodGroup in a Pod's `spec.schedulingGroup`.
pub(crate) fn pod_group(scheduling_group: &Value) -> Option<&str> {
    scheduling_group["podGroupName"].as_str()
}

impl<'de> Deserialize<'de> for PodObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut found = Value::Null;
        let tap = Tap {
            inner: deserializer,
            place: Place::Pod,
            found: &mut found,
        };
        let pod = Pod::deserialize(tap)?;
        let pod_group = pod_group(&found).map(Box::from);
        Ok(Self { pod, pod_group })
    }
}

/// Passes everything on to a Pod's own code but its managed fields, and keeps `spec.schedulingGroup`, of which that code
/// knows nothing: the object is read once.
struct Tap<'a, T> {
    inner: T,
    place: Place,
    found: &'a mut Value,
}

/// Where in a Pod.
#[derive(Clone, Copy)]
enum Place {
    Pod,
    Metadata,
    Spec,
}

impl<'a, T> Tap<'a, T> {
    fn split<U>(self, inner: U) -> (T, Tap<'a, U>) {
        let Self {
            inner: own,
            place,
            found,
        } = self;
        (
            own,
            Tap {
                inner,
                place,
                found,
            },
        )
    }
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Tap<'_, D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let (inner, visitor) = self.split(visitor);
        inner.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let (inner, visitor) = self.split(visitor);
        inner.deserialize_option(visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Tap<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(f)
    }

    fn visit_none<E: de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        let (visitor, inner) = self.split(inner);
        visitor.visit_some(inner)
    }

    fn visit_map<M: MapAccess<'de>>(self, inner: M) -> Result<V::Value, M::Error> {
        let (visitor, map) = self.split(inner);
        visitor.visit_map(TappedMap { map, next: None })
    }
}

struct TappedMap<'a, M> {
    map: Tap<'a, M>,
    /// Where the next value is, if something is to be tapped there.
    next: Option<Place>,
}

impl<'de, M: MapAccess<'de>> MapAccess<'de> for TappedMap<'_, M> {
    type Error = M::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, M::Error> {
        loop {
            let Some(key) = self.map.inner.next_key::<String>()? else {
                return Ok(None);
            };
            self.next = match (self.map.place, &*key) {
                (Place::Metadata, "managedFields") => {
                    self.map.inner.next_value::<IgnoredAny>()?;
                    continue;
                }
                (Place::Spec, "schedulingGroup") => {
                    *self.map.found = self.map.inner.next_value()?;
                    continue;
                }
                (Place::Pod, "metadata") => Some(Place::Metadata),
                (Place::Pod, "spec") => Some(Place::Spec),
                _ => None,
            };
            return seed.deserialize(key.into_deserializer()).map(Some);
        }
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, M::Error> {
        match self.next {
            Some(place) => self.map.inner.next_value_seed(Tap {
                inner: seed,
                place,
                found: self.map.found,
            }),
            None => self.map.inner.next_value_seed(seed),
        }
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Tap<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, inner: D) -> Result<S::Value, D::Error> {
        let (seed, inner) = self.split(inner);
        seed.deserialize(inner)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn member(scheduling_group: &Value) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "uid": "u", "namespace": "team", "name": "p",
                "labels": {crate::names::POD_GROUP_LABELS[0]: "older"},
            },
            "spec": {
                "nodeName": "n", "schedulingGroup": scheduling_group, "containers": [{"name": "c"}],
            },
            "status": {"phase": "Running", "schedulingGroup": {"podGroupName": "none"}},
        })
    }

    #[test]
    fn pod_group_is_read_from_text_and_values_and_the_rest_is_as_ever() {
        let text = member(&json!({"podGroupName": "gang"})).to_string();
        let whole: Pod = serde_json::from_str(&text).unwrap();
        let from_text: PodObject = serde_json::from_str(&text).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        let from_value: PodObject = serde_json::from_value(value).unwrap();
        assert_eq!(from_text, from_value);
        assert_eq!(from_text.pod, whole);
        assert_eq!(from_text.pod_group.as_deref(), Some("gang"));
        let facts = from_text.facts(crate::names::GPU_MEM).unwrap();
        assert_eq!(facts.group, Some(Group::in_tree("team", "gang")));
        assert_eq!(facts.node.as_deref(), Some("n"));
    }

    #[test]
    fn managed_fields_are_not_read_whatever_they_are() {
        for fields in [json!([{"fieldsV1": {"f:spec": {}}}]), json!(null), json!(3)] {
            let mut pod = member(&json!(null));
            let without: PodObject = serde_json::from_value(pod.clone()).unwrap();
            pod["metadata"]["managedFields"] = fields;
            let with: PodObject = serde_json::from_str(&pod.to_string()).unwrap();
            assert_eq!(with, without);
        }
    }

    #[test]
    fn pod_without_a_pod_group_keeps_the_group_of_its_labels() {
        for group in [
            json!(null),
            json!({}),
            json!({"podGroupName": null}),
            json!(7),
        ] {
            let pod: PodObject = serde_json::from_value(member(&group)).unwrap();
            let facts = pod.facts(crate::names::GPU_MEM).unwrap();
            assert_eq!(facts.group, Some("team/older".into()), "{group}");
        }
        let bare: PodObject = serde_json::from_value(json!({"spec": null})).unwrap();
        assert_eq!(bare, PodObject::default());
    }

    #[test]
    fn pod_that_cannot_be_decoded_says_which_field_is_wrong() {
        let mut broken = member(&json!({"podGroupName": "gang"}));
        broken["spec"]["containers"] = json!(3);
        assert!(serde_json::from_value::<PodObject>(broken).is_err());
    }
}
