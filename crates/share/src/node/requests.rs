//! Carries out the requests of an application.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rdmux_memory::mapping::Unmappable;
use rdmux_memory::{AnonymousMemory, ForeignMemory, ProcessMemory};
use rdmux_rnic::{Access, Memory, QpAttributes, QpState, QpType, RegionSpec, RegisterError, Time};
use rdmux_verbs::provider::user::{User, peer_credentials, user_of};
use rdmux_verbs::{Carrier, ConnectError, ConnectPair, ExternalPair, QpOptions, QueuePair};
use rdmux_wire::node::control::{self as wire, ErrorCode, Kind, Message, PrivateData};

use super::application::{
    Application, Link, Linked, Qp, REGIONS_MAX, Region, Shared, Srq, WORK_REQUESTS_MAX, limit, no_object,
};
use super::config::Resource;
use super::egress::Owner;
use super::sharing::Sharing;
use crate::control::convert::{
    Refusal, attributes_of, counters_to_wire, params_of, path_to_wire, qp_type_of, state_of, state_to_wire,
};

/// Maximum private data of an answer to a request: IBTA Vol 1, 12.6.8.
const ANSWER_DATA_MAX: usize = 196;

impl Application {
    /// Carries out a request, and returns the answer.
    ///
    /// # Errors
    /// The refusal. After one with [`ErrorCode::Protocol`] the application is detached.
    pub(super) fn carry_out(
        &mut self,
        shared: &mut Shared,
        now: Time,
        request: Message,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Message, Refusal> {
        match request {
            Message::AllocPd {} => {
                if !self.pds.has_room() {
                    return Err(limit("protection domains"));
                }
                let pd = shared.device.alloc_pd()?;
                let id = self.pds.insert(pd);
                if let (Some(id), Some(sharing)) = (id, &mut shared.sharing) {
                    self.domains.insert(id, sharing.new_domain());
                }
                made(id, "protection domains")
            }
            Message::Register {
                pd,
                offset,
                length,
                iova,
                access,
            } => self.register(shared, pd, (offset, length, iova), access, descriptors),
            Message::CreateQp {
                pd,
                qp_type,
                max_send_wr,
                max_recv_wr,
                srq,
                replays_writes,
            } => {
                let sizes = (max_send_wr, max_recv_wr);
                self.create_qp(shared, pd, qp_type, sizes, srq, replays_writes)
            }
            Message::Modify { qp, to, attributes } => {
                let to = state_of(to);
                self.modify(shared, now, qp, to, &attributes_of(&attributes))?;
                Ok(Message::Done {})
            }
            Message::Query { qp } => self.query(shared, qp),
            Message::Retire { qp } => {
                let qp = self.qps.get_mut(qp).ok_or_else(|| no_object(Kind::Qp))?;
                qp.qp.retire();
                if let Some(sharing) = &mut shared.sharing {
                    sharing.remove_qp(Instant::now(), qp.qp.qpn());
                }
                qp.is_in(shared, now, QpState::Reset);
                qp.is_in(shared, now, QpState::Error);
                Ok(Message::Done {})
            }
            Message::Destroy { kind, id } => self.destroy(shared, now, kind, id),
            Message::Listen { service, unreliable } => {
                if !self.listeners.has_room() {
                    return Err(limit("listeners"));
                }
                let types: &[QpType] = match unreliable {
                    true => &[QpType::Rc, QpType::Uc],
                    false => &[QpType::Rc],
                };
                let claim = shared.services.claim(service)?;
                let listener = shared.device.listen_service(service, types)?;
                let id = self
                    .listeners
                    .insert((listener, claim))
                    .ok_or_else(|| limit("listeners"))?;
                let token = self.token(Kind::Listener, id);
                if let Some((listener, _)) = self.listeners.get(id) {
                    listener.notify(&shared.events, token);
                }
                Ok(Message::Made { id })
            }
            Message::Connect {
                qp,
                peer,
                params,
                private_data,
            } => {
                if !self.connections.has_room() {
                    return Err(limit("connections"));
                }
                self.may_connect(shared, qp)?;
                if peer.ip() == shared.device.address() || self.memory.is_some() {
                    let qp = self.qps.get_mut(qp).ok_or_else(|| no_object(Kind::Qp))?;
                    qp.use_own(shared);
                }
                let pair = &self.qp(qp)?.qp;
                let external = external_of(shared, pair);
                let pair = external
                    .as_ref()
                    .map_or(ConnectPair::Own(pair), ConnectPair::External);
                let attempt =
                    shared
                        .device
                        .start_connect(pair, peer, &params_of(&params), private_data.bytes());
                let link = Link::Attempt(attempt.map_err(refused)?);
                self.link(shared, Linked { link, qp })
            }
            Message::Accept {
                request,
                qp,
                params,
                private_data,
            } => self.accept(shared, now, (request, qp), &params, &private_data),
            Message::Reject {
                request,
                private_data,
            } => {
                let request = self.requests.remove(request);
                let request = request.ok_or_else(|| no_object(Kind::Connection))?;
                request.reject(private_data.bytes());
                Ok(Message::Done {})
            }
            Message::Disconnect { connection } => {
                let linked = self.connections.get(connection);
                match linked.map(|linked| &linked.link) {
                    Some(Link::Made { connection, .. }) => connection.disconnect(),
                    Some(Link::Attempt(_)) | None => return Err(no_object(Kind::Connection)),
                }
                if let Some(qp) = linked.and_then(|linked| self.qps.get_mut(linked.qp)) {
                    qp.end_external(shared);
                }
                Ok(Message::Done {})
            }
            Message::Count {} => Ok(Message::Counts {
                values: counters_to_wire(&shared.device.counters()),
            }),
            Message::AskMtu { peer } => Ok(Message::Mtu {
                mtu: shared.device.path_mtu_to(peer)?,
            }),
            Message::CountObjects {} => Ok(Message::Objects {
                qps: self.qps.len() as u32,
                regions: self.regions.len() as u32,
            }),
            Message::OfferMemory {} => {
                let [file] = one(descriptors)?;
                let (uid, pid) = peer_credentials(&self.channel)?;
                // Pages that another user lets arrive late, or never, would hold up the node.
                if user_of(uid) != User::Own {
                    let why = "the node belongs to another user: it takes memory that it can map";
                    return Err(Refusal::new(ErrorCode::Memory, why));
                }
                let memory = ProcessMemory::of(file, pid);
                let memory = memory.map_err(|error| Refusal::new(ErrorCode::Memory, error.to_string()))?;
                self.memory = Some(Arc::new(memory));
                Ok(Message::Done {})
            }
            Message::RegisterOffered {
                pd,
                address,
                length,
                iova,
                access,
                pages,
            } => self.register_offered(shared, pd, (address, length, iova), access, (pages, descriptors)),
            Message::CreateSrq { pd, max_wr } => self.create_srq(pd, max_wr),
            Message::ModifySrq { srq, max_wr, limit } => {
                self.modify_srq(srq, max_wr, limit)?;
                Ok(Message::Done {})
            }
            Message::QuerySrq { srq } => {
                let info = self.srqs.get(srq).and_then(|srq| srq.queue.query());
                let info = info.ok_or_else(|| no_object(Kind::Srq))?;
                Ok(Message::SrqInfo {
                    max_wr: info.max_wr,
                    posted: info.posted.try_into().unwrap_or(u32::MAX),
                    limit: info.limit,
                })
            }
            Message::CreateAddressHandle {
                address,
                traffic_class,
            } => {
                let address = address.to_canonical();
                if address.is_multicast() || address.is_ipv4() != shared.device.address().is_ipv4() {
                    let why = "datagrams to this address: nodes send to single devices of their own family";
                    return Err(Refusal::new(ErrorCode::Unsupported, why));
                }
                let handle = shared.device.create_ah(address, traffic_class);
                made(self.handles.insert(handle), "address handles")
            }
            other => Err(Refusal::new(
                ErrorCode::Protocol,
                format!(
                    "{} is no request, or not one of an attached application",
                    other.name()
                ),
            )),
        }
    }

    fn register(
        &mut self,
        shared: &mut Shared,
        pd: u32,
        (offset, length, iova): (u64, u64, u64),
        access: u32,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Message, Refusal> {
        if self.regions.len() + self.going.len() >= REGIONS_MAX {
            return Err(limit("memory regions"));
        }
        let end = offset.checked_add(length).ok_or(RegisterError::OutOfRange)?;
        let [file] = one(descriptors)?;
        let memory = AnonymousMemory::of_file(file, end).map_err(cannot_map)?;
        self.register_memory(shared, pd, Arc::new(memory), (offset, length, iova), access)
    }

    fn register_offered(
        &mut self,
        shared: &mut Shared,
        pd: u32,
        (address, length, iova): (u64, u64, u64),
        access: u32,
        (pages, descriptors): (Option<wire::Pages>, Vec<OwnedFd>),
    ) -> Result<Message, Refusal> {
        if self.regions.len() + self.going.len() >= REGIONS_MAX {
            return Err(limit("memory regions"));
        }
        let memory = self.memory.clone();
        let memory = memory
            .ok_or_else(|| Refusal::new(ErrorCode::Memory, "the process has not offered its memory"))?;
        let pages = match pages {
            None => None,
            Some(wire::Pages { address, length }) => {
                let end = address.checked_add(length).ok_or(RegisterError::OutOfRange)?;
                let [file] = one(descriptors)?;
                Some((address..end, file))
            }
        };
        let memory = ForeignMemory::new(memory, address, length, pages).map_err(cannot_map)?;
        self.register_memory(shared, pd, Arc::new(memory), (0, length, iova), access)
    }

    fn register_memory(
        &mut self,
        shared: &mut Shared,
        pd: u32,
        memory: Arc<dyn Memory>,
        (offset, length, iova): (u64, u64, u64),
        access: u32,
    ) -> Result<Message, Refusal> {
        let domain = self.domains.get(&pd).copied();
        let pd = self.pds.get(pd).ok_or_else(|| no_object(Kind::Pd))?;
        let access = Access::from_bits(access);
        let access = access
            .ok_or_else(|| Refusal::new(ErrorCode::Unsupported, "an access right that nodes do not know"))?;
        let charges = self.charge(Resource::Regions, (Resource::Bytes, length))?;
        let region = pd.reg_mr(memory.clone(), offset, length, iova, access)?;
        let (lkey, rkey) = (region.lkey(), region.rkey());
        if let (Some(sharing), Some(domain)) = (&mut shared.sharing, domain) {
            let spec = RegionSpec {
                memory,
                memory_offset: offset,
                length,
                iova,
                access,
            };
            sharing.add_region(domain, (lkey, rkey), spec);
        }
        let id = self
            .regions
            .insert(Region::new(region, charges))
            .ok_or_else(|| limit("memory regions"))?;
        Ok(Message::Registered { id, lkey, rkey })
    }

    fn create_qp(
        &mut self,
        shared: &mut Shared,
        pd: u32,
        qp_type: wire::QpType,
        (max_send_wr, max_recv_wr): (u32, u32),
        srq: Option<u32>,
        replays_writes: bool,
    ) -> Result<Message, Refusal> {
        if !self.qps.has_room() {
            return Err(limit("queue pairs"));
        }
        // Without one of the device's, connections of other applications that share queue pairs would fail.
        let most = shared.sharing.as_ref().map(Sharing::qps_max);
        if most.is_some_and(|most| shared.egress.flows() >= most) {
            let text = "the node needs the device's other queue pairs for those that are shared";
            return Err(Refusal::new(ErrorCode::Limit, text.to_owned()));
        }
        if max_send_wr > WORK_REQUESTS_MAX || max_recv_wr > WORK_REQUESTS_MAX {
            return Err(limit("requests of a queue pair"));
        }
        let domain = self.domains.get(&pd).copied();
        let pd = self.pds.get(pd).ok_or_else(|| no_object(Kind::Pd))?.clone();
        let requests = u64::from(max_send_wr) + u64::from(max_recv_wr);
        let charges = self.charge(Resource::QueuePairs, (Resource::Requests, requests))?;
        let depth = Application::depth_of(shared, max_send_wr);
        let srq = match srq {
            None => None,
            Some(srq) => {
                let srq = self.srqs.get(srq).ok_or_else(|| no_object(Kind::Srq))?;
                Some(srq.queue.clone())
            }
        };
        // The shared receive queue has room for its own.
        let completions = depth + if srq.is_some() { 0 } else { max_recv_wr };
        self.reserve(completions)?;
        let options = QpOptions {
            qp_type: qp_type_of(qp_type),
            max_send_wr: depth,
            max_recv_wr,
            srq,
            ..QpOptions::new(&self.cq)
        };
        let qp = pd
            .create_qp(&options)
            .inspect_err(|_| self.release(completions))?;
        let qpn = qp.qpn();
        let id = self.qps.insert_with(|id| {
            let owner = Owner {
                application: self.slot,
                qp: id,
            };
            Some(Qp {
                qp,
                depth,
                completions,
                flow: shared.egress.add_flow(owner, max_send_wr)?,
                group: None,
                peer: None,
                failed: false,
                has_ended: false,
                charges,
            })
        });
        let id = id.ok_or_else(|| limit("queue pairs"))?;
        self.by_qpn.insert(qpn, id);
        if let (Some(sharing), Some(domain), Some(qp)) = (&mut shared.sharing, domain, self.qps.get(id))
            && options.qp_type == QpType::Rc
            && options.srq.is_none()
        {
            let owner = Owner {
                application: self.slot,
                qp: id,
            };
            let tenant = (!self.is_tenant).then_some(self.tenant);
            let tenant = (self.belonging.account.name(), tenant);
            sharing.add_qp(
                qpn,
                (owner, qp.flow),
                domain,
                (max_recv_wr, replays_writes),
                tenant,
            );
        }
        Ok(Message::QpMade { id, qpn })
    }

    /// Brings a queue pair to a state: that of the device, unless it goes over a shared one.
    pub(super) fn modify(
        &mut self,
        shared: &mut Shared,
        now: Time,
        qp: u32,
        to: QpState,
        attributes: &QpAttributes,
    ) -> Result<(), Refusal> {
        let mut attributes = *attributes;
        let qp = self.qps.get_mut(qp).ok_or_else(|| no_object(Kind::Qp))?;
        let qpn = qp.qp.qpn();
        // The device chooses it.
        if let Some(path) = attributes.path.as_mut().filter(|path| path.src_port == 0) {
            let peer = attributes.dest_qpn.unwrap_or(qpn);
            path.src_port = shared.device.source_port(peer)?;
        }
        let attributes = &attributes;
        let is_virtual = |shared: &mut Shared| {
            let sharing = shared.sharing.as_mut();
            sharing.is_some_and(|sharing| sharing.modify(Instant::now(), qpn, to, attributes))
        };
        if to == QpState::Rtr && self.memory.is_some() {
            // Nobody else's connections may depend on memory that its process can take away.
            qp.use_own(shared);
        }
        // The device says what it does not allow, before anybody else is told.
        let is_of_device = matches!(to, QpState::Init | QpState::Reset);
        if is_of_device {
            qp.qp.modify(to, attributes)?;
        }
        if !is_virtual(shared) && !is_of_device {
            if to == QpState::Rtr {
                qp.use_own(shared);
            }
            qp.qp.modify(to, attributes)?;
        }
        qp.is_in(shared, now, to);
        Ok(())
    }

    fn query(&self, shared: &Shared, qp: u32) -> Result<Message, Refusal> {
        let qp = &self.qp(qp)?.qp;
        let mut info = qp.query();
        let sharing = shared.sharing.as_ref();
        let state = sharing.and_then(|sharing| sharing.state(qp.qpn()));
        if let (Some(info), Some((state, attributes))) = (&mut info, state) {
            info.state = state;
            if let Some(attributes) = attributes {
                info.dest_qpn = attributes.dest_qpn.unwrap_or(info.dest_qpn);
                info.path = attributes.path.or(info.path);
                info.path_mtu = attributes.path_mtu.unwrap_or(info.path_mtu);
            }
        }
        let info =
            info.ok_or_else(|| Refusal::new(ErrorCode::State, "the device knows nothing of the queue pair"))?;
        Ok(Message::QpInfo {
            state: state_to_wire(info.state),
            dest_qpn: info.dest_qpn,
            path: info.path.as_ref().map(path_to_wire),
            path_mtu: info.path_mtu,
            qkey: info.qkey,
            send_outstanding: info.send_outstanding.try_into().unwrap_or(u32::MAX),
            recv_posted: info.recv_posted.try_into().unwrap_or(u32::MAX),
            carrier: match state {
                Some(_) => Some("a queue pair of the node, which connections share".into()),
                None => qp.carrier().map(|carrier| match carrier {
                    Carrier::SharedMemory => "shared memory".into(),
                    Carrier::Rnic => "RNIC".into(),
                    Carrier::Udp(why) => why,
                }),
            },
        })
    }

    fn destroy(&mut self, shared: &mut Shared, now: Time, kind: Kind, id: u32) -> Result<Message, Refusal> {
        let is_there = match kind {
            Kind::Pd => self.pds.remove(id).is_some(),
            // [`Application::deregister`] has the others.
            Kind::Region => false,
            Kind::Qp => self.remove_qp(shared, now, id),
            Kind::Listener => self.listeners.remove(id).is_some(),
            Kind::Srq => self.remove_srq(id),
            Kind::AddressHandle => self.handles.remove(id).is_some(),
            Kind::Connection => {
                let removed = self.connections.remove(id);
                if let Some(Linked {
                    link: Link::Made { connection, .. },
                    qp,
                }) = &removed
                    && let Some(qp) = self.qps.get_mut(*qp)
                    && shared.sharing.is_some()
                {
                    connection.disconnect();
                    qp.end_external(shared);
                }
                removed.is_some()
            }
        };
        is_there
            .then_some(Message::Done {})
            .ok_or_else(|| no_object(kind))
    }

    fn create_srq(&mut self, pd: u32, max_wr: u32) -> Result<Message, Refusal> {
        if !self.srqs.has_room() {
            return Err(limit("shared receive queues"));
        }
        let completions = completions_of_srq(max_wr)?;
        let pd = self.pds.get(pd).ok_or_else(|| no_object(Kind::Pd))?.clone();
        let charge = self.belonging.account.charge(Resource::Requests, max_wr.into())?;
        self.reserve(completions)?;
        let queue = pd.create_srq(max_wr).inspect_err(|_| self.release(completions))?;
        let number = queue.srqn().0;
        let id = self.srqs.insert(Srq {
            queue,
            completions,
            charge,
        });
        let id = id.ok_or_else(|| limit("shared receive queues"))?;
        self.by_srqn.insert(number, id);
        Ok(Message::SrqMade { id, number })
    }

    fn modify_srq(&mut self, id: u32, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), Refusal> {
        let srq = self.srqs.get(id).ok_or_else(|| no_object(Kind::Srq))?;
        let (queue, before) = (srq.queue.clone(), srq.completions);
        let now = max_wr.map_or(Ok(before), completions_of_srq)?;
        let more = now.saturating_sub(before);
        let charged = srq.charge.amount();
        let receives = max_wr.map_or(charged, u64::from);
        let added = receives.checked_sub(charged).filter(|added| *added > 0);
        let account = &self.belonging.account;
        let charge = added.map(|added| account.charge(Resource::Requests, added));
        let charge = charge.transpose()?;
        self.reserve(more)?;
        queue.modify(max_wr, limit).inspect_err(|_| self.release(more))?;
        self.release(before.saturating_sub(now));
        if let Some(srq) = self.srqs.get_mut(id) {
            srq.completions = now;
            charge.into_iter().for_each(|charge| srq.charge.add(charge));
            srq.charge.lower_to(receives);
        }
        Ok(())
    }

    /// Removes a shared receive queue. Queue pairs that take their receives from it keep it until they end.
    fn remove_srq(&mut self, id: u32) -> bool {
        let removed = self.srqs.remove(id);
        let Some(Srq {
            queue, completions, ..
        }) = removed
        else {
            return false;
        };
        self.by_srqn.remove(&queue.srqn().0);
        self.release(completions);
        true
    }

    /// Deregisters a region. Returns the answer to the request, unless the region is in use on shared queue pairs or other nodes know its key: it
    /// comes once nobody can access it any more.
    pub(super) fn deregister(
        &mut self,
        shared: &mut Shared,
        request: u32,
        id: u32,
    ) -> Result<Option<Message>, Refusal> {
        let region = self.regions.remove(id);
        let Region { region, charges } = region.ok_or_else(|| no_object(Kind::Region))?;
        let rkey = region.rkey();
        if let Some(sharing) = &mut shared.sharing
            && !sharing.remove_region(Instant::now(), region, charges)
        {
            self.going.insert(rkey, request);
            return Ok(None);
        }
        Ok(Some(Message::Done {}))
    }

    pub(super) fn remove_qp(&mut self, shared: &mut Shared, now: Time, id: u32) -> bool {
        let Some(mut removed) = self.qps.remove(id) else {
            return false;
        };
        if let Some(sharing) = &mut shared.sharing {
            sharing.remove_qp(Instant::now(), removed.qp.qpn());
        }
        removed.unbind(shared, now);
        shared.egress.remove_flow(now, removed.flow);
        self.drained.remove(&id);
        self.by_qpn.remove(&removed.qp.qpn());
        self.release(removed.completions);
        true
    }

    /// Refuses to connect a queue pair that is connected already, or was, over a shared one. The device refuses it of its own ones.
    fn may_connect(&self, shared: &Shared, qp: u32) -> Result<(), Refusal> {
        let qpn = self.qp(qp)?.qp.qpn();
        match shared.sharing.as_ref().is_some_and(|sharing| sharing.has(qpn)) {
            true => {
                let why = "the queue pair is, or was, connected: bring it to Reset first";
                Err(Refusal::new(ErrorCode::State, why))
            }
            false => Ok(()),
        }
    }

    fn accept(
        &mut self,
        shared: &mut Shared,
        now: Time,
        (request, qp): (u32, u32),
        params: &wire::ConnectParams,
        private_data: &PrivateData,
    ) -> Result<Message, Refusal> {
        if !self.connections.has_room() {
            return Err(limit("connections"));
        }
        if private_data.bytes().len() > ANSWER_DATA_MAX {
            return Err(refused(ConnectError::PrivateData));
        }
        self.may_connect(shared, qp)?;
        let pair = self.qp(qp)?.qp.clone();
        let request = self.requests.remove(request);
        let mut request = request.ok_or_else(|| no_object(Kind::Connection))?;
        let params = params_of(params);
        if (request.peer() == shared.device.address() || self.memory.is_some())
            && let Some(qp) = self.qps.get_mut(qp)
        {
            qp.use_own(shared);
        }
        let connection = match external_of(shared, &pair) {
            None => request.accept(&pair, &params, private_data.bytes()),
            Some(external) => {
                for to in [QpState::Init, QpState::Rtr, QpState::Rts] {
                    let attributes = request.attributes(to, &params).map_err(refused)?;
                    self.modify(shared, now, qp, to, &attributes)?;
                }
                request.accept_pair(ConnectPair::External(&external), &params, private_data.bytes())
            }
        };
        let link = Link::Made {
            connection: connection.map_err(refused)?,
            known: (false, false),
        };
        self.link(shared, Linked { link, qp })
    }

    /// Adds a connection or an attempt, which reports from then on.
    fn link(&mut self, shared: &Shared, linked: Linked) -> Result<Message, Refusal> {
        let id = self
            .connections
            .insert(linked)
            .ok_or_else(|| limit("connections"))?;
        let token = self.token(Kind::Connection, id);
        match self.connections.get(id).map(|linked| &linked.link) {
            Some(Link::Attempt(attempt)) => attempt.notify(&shared.events, token),
            Some(Link::Made { connection, .. }) => connection.notify(&shared.events, token),
            None => {}
        }
        Ok(Message::Made { id })
    }
}

impl Qp {
    /// Has the device's queue pair be used by itself, with the receives that wait for that.
    fn use_own(&mut self, shared: &mut Shared) {
        let sharing = shared.sharing.as_mut();
        let receives = sharing.map_or(Vec::new(), |sharing| sharing.make_own(self.qp.qpn()));
        if !receives
            .into_iter()
            .all(|receive| self.qp.post_recv(receive).is_ok())
        {
            self.fail(shared);
        }
    }

    /// Has the scheduler know the state into which the application has put the queue pair.
    fn is_in(&mut self, shared: &mut Shared, now: Time, state: QpState) {
        match state {
            QpState::Reset => {
                // It may be connected to another peer, by another class.
                self.unbind(shared, now);
                shared.egress.reset(now, self.flow);
                (self.failed, self.has_ended) = (false, false);
            }
            QpState::Rts => shared.egress.resume(now, self.flow),
            QpState::Sqd => shared.egress.pause(now, self.flow),
            QpState::Error => shared.egress.fail(now, self.flow),
            QpState::Init | QpState::Rtr | QpState::Sqe => {}
        }
    }
}

/// Returns the completions that a shared receive queue of so many receives may have: those of a full queue may wait for room in the ring
/// while it is filled again.
fn completions_of_srq(max_wr: u32) -> Result<u32, Refusal> {
    match max_wr <= WORK_REQUESTS_MAX {
        true => Ok(2 * max_wr),
        false => Err(limit("requests of a shared receive queue")),
    }
}

/// Returns the descriptor of a message that has one.
fn one(descriptors: Vec<OwnedFd>) -> Result<[OwnedFd; 1], Refusal> {
    descriptors
        .try_into()
        .map_err(|_| Refusal::new(ErrorCode::Memory, "the memory comes with one descriptor"))
}

/// Returns the refusal of memory that the node cannot map without risk.
fn cannot_map(error: io::Error) -> Refusal {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    let code = match inner {
        Some(Unmappable::TooShort { .. }) => ErrorCode::OutOfRange,
        _ => ErrorCode::Memory,
    };
    Refusal::new(code, format!("the node cannot map the memory: {error}"))
}

/// Returns a queue pair as its owner brings it up, if the node is to decide how.
fn external_of(shared: &Shared, qp: &QueuePair) -> Option<ExternalPair> {
    let qpn = qp.qpn();
    let is_known = shared
        .sharing
        .as_ref()
        .is_some_and(|sharing| sharing.may_share(qpn));
    is_known.then_some(ExternalPair {
        qpn,
        qp_type: QpType::Rc,
        srq: false,
    })
}

fn made(id: Option<u32>, what: &str) -> Result<Message, Refusal> {
    id.map(|id| Message::Made { id }).ok_or_else(|| limit(what))
}

/// Returns the refusal for an error of connecting that is not the peer's.
pub(super) fn refused(error: ConnectError) -> Refusal {
    match error {
        ConnectError::Io(error) => error.into(),
        ConnectError::Modify(error) => error.into(),
        ConnectError::Unreachable(_) => Refusal::new(ErrorCode::Unreachable, error.to_string()),
        other => Refusal::new(ErrorCode::State, other.to_string()),
    }
}
