//! Two extenders, a Lease, pods, and Bindings under way. One card; each pod takes one share of it.
//!
//! Requests to the API server are single steps, except Bindings, which arrive at any time or never. A process may stop
//! anywhere and go on later without a step of its own: others may always act between two of its steps.

use super::search::Model;

/// Pods; the card holds one fewer.
pub(crate) const PODS: usize = 2;
const ROOM: usize = PODS - 1;
/// A version that no copy bears; it gets a number at the end of its step.
const NEW: u8 = u8::MAX;

/// The safety measures of an extender.
#[derive(Clone, Copy)]
pub(crate) struct Protocol {
    /// The fence writes a value that no pod has had before, not the number of the epoch alone.
    pub(crate) fresh_mark: bool,
    /// A pod whose resourceVersion did not move, or that could not be written, counts as unfenced:
    /// its share is held back. Else the first counts as fenced, and the second ends the takeover.
    pub(crate) hold_back: bool,
    /// A look at the Lease distinguishes one tenure from every other, not only holder and epoch.
    pub(crate) tell_tenures: bool,
    /// An extender with an unfenced pod does not call its end clean.
    pub(crate) clean_if_fenced: bool,
}

/// How often things may happen.
#[derive(Clone, Copy)]
pub(crate) struct World {
    pub(crate) protocol: Protocol,
    /// Takeovers begun.
    pub(crate) swaps: u8,
    /// Deletions of the Lease.
    pub(crate) deletions: u8,
    /// Ends of a process without notice.
    pub(crate) crashes: u8,
    /// Patches that the API server refuses, or takes without changing anything.
    pub(crate) failures: u8,
    /// Changes of a pod by another client.
    pub(crate) touches: u8,
    /// Both extenders have one and the same name.
    pub(crate) namesakes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Tenure {
    holder: u8,
    epoch: u8,
    /// Differs from all others: the Lease's UID and the time of its acquisition.
    token: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Lease {
    tenure: Tenure,
    clean: bool,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Pod {
    version: u8,
    epoch: u8,
    mark: u8,
    bound: bool,
}

/// How far a takeover has come with one pod.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Fence {
    /// Listed in this version, still to be patched.
    Open(u8),
    Done,
    /// Not moved from this version.
    Failed(u8),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    /// The Lease is won; pods are to be listed.
    Won(Tenure),
    Fencing(Tenure, [Fence; PODS]),
    Deciding(Tenure),
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Copy_ {
    version: u8,
    bound: bool,
    /// A look at the Lease that began after this copy had come showed our tenure.
    looked: bool,
    /// Its share is reserved.
    reserved: bool,
    /// A Binding was sent whose outcome we have not heard.
    sent: bool,
    /// Its share is held back as long as it is in this version.
    unfenced: Option<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Extender {
    phase: Phase,
    pods: [Copy_; PODS],
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct State {
    lease: Option<Lease>,
    pods: [Pod; PODS],
    extenders: [Extender; 2],
    /// Bindings under way: sender, pod and version.
    posts: Vec<(u8, u8, u8)>,
    tokens: u8,
    swaps: u8,
    deletions: u8,
    crashes: u8,
    failures: u8,
    touches: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    TakeLease(usize),
    ListToFence(usize),
    Patch(usize, usize),
    PatchRefused(usize, usize),
    PatchWithoutEffect(usize, usize),
    Relist(usize),
    Watch(usize, usize),
    Reserve(usize, usize),
    Look(usize),
    Send(usize, usize),
    Arrive(usize, usize),
    ArriveUnheard(usize, usize),
    Crash(usize),
    LeaveCleanly(usize),
    DeleteLease,
    TouchPod(usize),
}

impl State {
    fn see(&mut self, extender: usize, pod: usize) {
        let Pod { version, bound, .. } = self.pods[pod];
        let copy = &mut self.extenders[extender].pods[pod];
        copy.looked &= copy.version == version;
        copy.version = version;
        copy.bound = bound;
        copy.reserved &= !bound;
        copy.sent &= !bound;
        if copy.unfenced != Some(version) {
            copy.unfenced = None;
        }
    }

    /// The same state in one of the ways in which it can be written.
    fn tidy(mut self, swaps: u8) -> Self {
        for extender in &mut self.extenders {
            if extender.phase == Phase::Idle && self.swaps == swaps {
                extender.pods = Default::default();
            }
        }
        // Removes Bindings that can never succeed and whose end no client waits for.
        let (pods, extenders) = (self.pods, self.extenders);
        self.posts.retain(|&(sender, pod, version)| {
            let pod = usize::from(pod);
            let awaited = extenders[usize::from(sender)].pods[pod].sent;
            awaited || !pods[pod].bound && pods[pod].version == version
        });
        self.posts.sort_unstable();
        // Only whether two versions of a pod are equal is of any matter.
        for pod in 0..PODS {
            let mut known = vec![self.pods[pod].version];
            let mut number = |version: &mut u8| {
                let place = known.iter().position(|other| other == version);
                *version = place.unwrap_or_else(|| {
                    known.push(*version);
                    known.len() - 1
                }) as u8;
            };
            number(&mut self.pods[pod].version);
            for extender in &mut self.extenders {
                let copy = &mut extender.pods[pod];
                number(&mut copy.version);
                copy.unfenced.iter_mut().for_each(&mut number);
                if let Phase::Fencing(_, fences) = &mut extender.phase
                    && let Fence::Open(version) | Fence::Failed(version) = &mut fences[pod]
                {
                    number(version);
                }
            }
            let posts = self
                .posts
                .iter_mut()
                .filter(|(_, of, _)| usize::from(*of) == pod);
            posts.for_each(|(_, _, version)| number(version));
        }
        self
    }

    fn bound(&self) -> usize {
        self.pods.iter().filter(|pod| pod.bound).count()
    }
}

impl World {
    fn name(&self, extender: usize) -> u8 {
        if self.namesakes { 0 } else { extender as u8 }
    }

    /// The extender's tenure is the tenure of the Lease, as far as its protocol can distinguish.
    fn ours(&self, lease: Option<Lease>, tenure: Tenure) -> bool {
        lease.is_some_and(|lease| {
            let seen = lease.tenure;
            let same = (seen.holder, seen.epoch) == (tenure.holder, tenure.epoch);
            same && (!self.protocol.tell_tenures || seen.token == tenure.token)
        })
    }

    fn take_lease(&self, state: &mut State, extender: usize) {
        let last = state.lease.map_or(0, |lease| lease.tenure.epoch);
        let clean = state.lease.is_some_and(|lease| lease.clean);
        state.tokens += 1;
        state.swaps += 1;
        let tenure = Tenure {
            holder: self.name(extender),
            // A new Lease gets the first epoch: a start above the epochs on the pods would only help people.
            epoch: last + 1,
            token: state.tokens,
        };
        state.lease = Some(Lease {
            tenure,
            clean: false,
        });
        state.extenders[extender].phase = match clean {
            true => Phase::Fencing(tenure, [Fence::Done; PODS]),
            false => Phase::Won(tenure),
        };
    }

    fn next_of(&self, state: &State, me: usize, out: &mut Vec<(Action, State)>) {
        let mut step = |action, change: &dyn Fn(&mut State)| {
            let mut next = state.clone();
            change(&mut next);
            out.push((action, next));
        };
        let extender = &state.extenders[me];
        if state.crashes < self.crashes && extender.phase != Phase::Idle {
            step(Action::Crash(me), &|next| {
                next.crashes += 1;
                next.extenders[me].phase = Phase::Idle;
                next.extenders[me].pods = Default::default();
                (0..PODS).for_each(|pod| next.see(me, pod));
            });
        }
        match extender.phase {
            Phase::Idle if state.swaps < self.swaps => {
                step(Action::TakeLease(me), &|next| self.take_lease(next, me));
            }
            Phase::Idle => {}
            Phase::Won(tenure) => step(Action::ListToFence(me), &|next| {
                let fence = |pod: Pod| match pod.bound {
                    true => Fence::Done,
                    false => Fence::Open(pod.version),
                };
                next.extenders[me].phase = Phase::Fencing(tenure, next.pods.map(fence));
            }),
            Phase::Fencing(tenure, fences) => self.fencing(state, me, tenure, fences, &mut step),
            Phase::Deciding(tenure) => self.deciding(state, me, tenure, &mut step),
        }
        // A takeover ends with a list, so that the events before it are of interest only now.
        let deciding = matches!(extender.phase, Phase::Deciding(_));
        for pod in (0..PODS).filter(|_| deciding) {
            let copy = extender.pods[pod];
            let now = state.pods[pod];
            if (copy.version, copy.bound) != (now.version, now.bound) {
                step(Action::Watch(me, pod), &|next| next.see(me, pod));
            }
        }
    }

    fn fencing(
        &self,
        state: &State,
        me: usize,
        tenure: Tenure,
        fences: [Fence; PODS],
        step: &mut impl FnMut(Action, &dyn Fn(&mut State)),
    ) {
        let set = |next: &mut State, pod: usize, fence| {
            let mut fences = fences;
            fences[pod] = fence;
            next.extenders[me].phase = Phase::Fencing(tenure, fences);
        };
        // One after the other: their order is of no matter.
        let open = fences
            .iter()
            .position(|fence| matches!(fence, Fence::Open(_)));
        if let Some(pod) = open {
            let Fence::Open(listed) = fences[pod] else {
                return;
            };
            let judge = |next: &State| match next.pods[pod].version == listed {
                true if self.protocol.hold_back => Fence::Failed(listed),
                _ => Fence::Done,
            };
            step(Action::Patch(me, pod), &|next| {
                let target = &mut next.pods[pod];
                let mark = match self.protocol.fresh_mark {
                    true => tenure.token,
                    false => 0,
                };
                if (target.epoch, target.mark) != (tenure.epoch, mark) {
                    (target.epoch, target.mark) = (tenure.epoch, mark);
                    target.version = NEW;
                }
                let fence = judge(next);
                set(next, pod, fence);
            });
            if state.failures < self.failures {
                step(Action::PatchWithoutEffect(me, pod), &|next| {
                    next.failures += 1;
                    let fence = judge(next);
                    set(next, pod, fence);
                });
                step(Action::PatchRefused(me, pod), &|next| {
                    next.failures += 1;
                    match self.protocol.hold_back {
                        true => set(next, pod, Fence::Failed(listed)),
                        false => next.extenders[me].phase = Phase::Idle,
                    }
                });
            }
            return;
        }
        step(Action::Relist(me), &|next| {
            for (pod, fence) in fences.iter().enumerate() {
                let copy = &mut next.extenders[me].pods[pod];
                copy.looked = false;
                copy.unfenced = match *fence {
                    Fence::Failed(version) => Some(version),
                    _ => None,
                };
                next.see(me, pod);
            }
            next.extenders[me].phase = Phase::Deciding(tenure);
        });
    }

    fn deciding(
        &self,
        state: &State,
        me: usize,
        tenure: Tenure,
        step: &mut impl FnMut(Action, &dyn Fn(&mut State)),
    ) {
        let copies = &state.extenders[me].pods;
        step(Action::Look(me), &|next| {
            let extender = &mut next.extenders[me];
            match self.ours(next.lease, tenure) {
                true => extender.pods.iter_mut().for_each(|copy| copy.looked = true),
                false => extender.phase = Phase::Idle,
            }
        });
        let waits = copies.iter().any(|copy| copy.sent);
        let unfenced = copies.iter().any(|copy| copy.unfenced.is_some());
        let held = waits || unfenced && self.protocol.clean_if_fenced;
        if !held && self.ours(state.lease, tenure) {
            step(Action::LeaveCleanly(me), &|next| {
                if let Some(lease) = &mut next.lease {
                    lease.clean = true;
                }
                next.extenders[me].phase = Phase::Idle;
                let copies = &mut next.extenders[me].pods;
                copies.iter_mut().for_each(|copy| copy.reserved = false);
            });
        }
        let holds = |copy: &Copy_| copy.bound || copy.reserved || copy.unfenced.is_some();
        let held = copies.iter().filter(|copy| holds(copy)).count();
        for (pod, copy) in copies.iter().enumerate() {
            let free = !holds(copy) && held < ROOM;
            if free {
                step(Action::Reserve(me, pod), &|next| {
                    next.extenders[me].pods[pod].reserved = true;
                });
            }
            // The bound of the card is checked again for each Binding.
            if copy.reserved && copy.looked && !copy.sent && held <= ROOM {
                step(Action::Send(me, pod), &|next| {
                    next.extenders[me].pods[pod].sent = true;
                    let post = (me as u8, pod as u8, copy.version);
                    next.posts.push(post);
                });
            }
        }
    }
}

impl Model for World {
    type State = State;
    type Action = Action;

    fn start(&self) -> State {
        let fresh = Extender {
            phase: Phase::Idle,
            pods: Default::default(),
        };
        State {
            lease: None,
            pods: Default::default(),
            extenders: [fresh; 2],
            posts: Vec::new(),
            tokens: 0,
            swaps: 0,
            deletions: 0,
            crashes: 0,
            failures: 0,
            touches: 0,
        }
    }

    fn next(&self, state: &State) -> Vec<(Action, State)> {
        let mut out = Vec::new();
        for me in 0..2 {
            self.next_of(state, me, &mut out);
        }
        let mut step = |action, change: &dyn Fn(&mut State)| {
            let mut next = state.clone();
            change(&mut next);
            out.push((action, next));
        };
        for (index, &(sender, pod, version)) in state.posts.iter().enumerate() {
            let (sender, pod) = (usize::from(sender), usize::from(pod));
            let arrive = |next: &mut State| {
                next.posts.remove(index);
                let target = &mut next.pods[pod];
                if !target.bound && target.version == version {
                    target.bound = true;
                    target.version = NEW;
                }
            };
            // The answer is lost: it is as if the sender had crashed, or waits for the watch.
            step(Action::ArriveUnheard(sender, pod), &arrive);
            if state.extenders[sender].pods[pod].sent {
                step(Action::Arrive(sender, pod), &|next| {
                    arrive(next);
                    let bound = next.pods[pod].bound;
                    let copy = &mut next.extenders[sender].pods[pod];
                    copy.sent = false;
                    copy.reserved = false;
                    copy.bound |= bound;
                });
            }
        }
        if state.lease.is_some() && state.deletions < self.deletions {
            step(Action::DeleteLease, &|next| {
                next.deletions += 1;
                next.lease = None;
            });
        }
        if state.touches < self.touches {
            for pod in 0..PODS {
                step(Action::TouchPod(pod), &|next| {
                    next.touches += 1;
                    next.pods[pod].version = NEW;
                });
            }
        }
        let tidy = |(action, state): (Action, State)| (action, state.tidy(self.swaps));
        out.into_iter().map(tidy).collect()
    }

    fn is_wrong(&self, state: &State) -> bool {
        state.bound() > ROOM
    }
}
